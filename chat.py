"""Talk to a stage, an export or a server: the same loop, tools and sandbox as in training. Tool calls show as they happen.

    python chat.py --db shop.sqlite                                # the demo's newest stage, about your database
    python chat.py --config recipes/demo.yaml --stage sft --task mini_math --question "What is 37 * 48?"
    python chat.py --db shop.sqlite --stage checkpoints/RUN/export/hf
    python chat.py --db shop.sqlite --endpoint http://localhost:8000/v1 --served_model NAME

In a session: /help, /schema, /sql SELECT ..., /reset (forget what was said), Ctrl-C stops an answer, Ctrl-D ends.
"""

import sqlite3
from pathlib import Path

from core.config import RecipeError, UserError, load_recipe_args, run_step

COMMANDS = """/schema          the tables of the database
/sql SELECT ...  run a query yourself, in the agent's sandbox
/reset           forget the conversation so far
Ctrl-C           stop an answer; at the prompt, leave (as Ctrl-D)"""


def add_arguments(parser):
    parser.add_argument(
        "--stage", help="base, sft, grpo, a checkpoint or a model folder (default: the newest there is)"
    )
    parser.add_argument("--db", help="a SQLite file to ask about")
    parser.add_argument("--task", help="talk to this task's agent instead of a database's, e.g. gsm8k")
    parser.add_argument("--question", help="ask once and stop")
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server instead of a stage")
    parser.add_argument("--served_model", metavar="NAME", help="the model's name at the endpoint")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments, default=usual)
    if bool(args.db) == bool(args.task):
        raise RecipeError("name one of --db FILE.sqlite or --task NAME (gsm8k, mini_math)")
    if args.db and not Path(args.db).is_file():
        raise UserError(f"no database file '{args.db}'")
    if args.endpoint and not args.served_model:
        raise RecipeError("--endpoint needs --served_model NAME (GET URL/models lists them)")
    from tasks.prepare import question_row

    question_row(recipe, "", args.db, args.task)  # a file that is no database, a task without a chat: said at once
    tokenizer, engine = open_engine(recipe, args)
    session = Session(recipe, args, tokenizer, engine)
    if args.question:
        return session.ask(args.question)
    print("Ask a question; /help lists the commands, Ctrl-D ends.")
    while True:
        try:
            line = input("question> ").strip()
        except (EOFError, KeyboardInterrupt):
            return print()
        try:
            session.take(line)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except UserError as error:
            print(f"error: {error}")
        except (sqlite3.DatabaseError, FileNotFoundError) as error:  # the file was replaced or removed meanwhile
            if not args.db:
                raise
            found = error if Path(args.db).is_file() else "the file is gone"
            print(f"error: cannot read {args.db}: {found}; put the database back there, then ask again")


def usual(args) -> str:
    """The recipe where none is named: that of the model's own manifest; for a server an ordinary one; else the demo's."""
    folders = [Path(args.stage), Path(args.stage).parent] if args.stage else []
    own = [str(f / "manifest.json") for f in folders if (f / "manifest.json").is_file()]
    served = "recipes/spider-qwen2.5-coder-1.5b-24gb.yaml"
    return own[0] if own else served if args.endpoint else "recipes/demo.yaml"


def open_engine(recipe, args) -> tuple:
    from core.engines import open_endpoint, open_source
    from core.models import stage_source

    if args.endpoint:
        tokenizer, engine = open_endpoint(recipe, args.endpoint, args.served_model, 1)
        return tokenizer, engine(0.0)
    made = [s for s in ("grpo", "sft") if (recipe.run_dir / s / "manifest.json").exists()]
    if not (made or args.stage):
        print(f"run '{recipe.run}' has no trained stage yet: this is its base model, which knows no tool")
    stage = args.stage or (*made, "base")[0]
    source = stage_source(recipe, stage)
    print(f"{stage}: {source}")
    tokenizer, engine = open_source(recipe, source, "transformers", say=lambda _: None)
    return tokenizer, engine(0.0)


class Session:
    """A conversation; what was said before is part of the next prompt."""

    def __init__(self, recipe, args, tokenizer, engine):
        from rich.console import Console

        from envs import ENVIRONMENTS
        from tasks.prepare import environment_limits

        self.recipe, self.args, self.tokenizer, self.engine = recipe, args, tokenizer, engine
        self.console, self.before = Console(highlight=False), []
        kind = "sql" if args.db else "calculator"
        self.make_env = lambda: ENVIRONMENTS[kind](**environment_limits(recipe, kind))

    def take(self, line: str) -> None:
        """A line of the user: a command or a question."""
        word, _, rest = line.partition(" ")
        if not line or word in ("/help", "/?"):
            print(COMMANDS)
        elif word == "/reset":
            self.before = []
        elif word in ("/schema", "/sql") and not self.args.db:
            print("there is no database in this conversation: start with --db FILE.sqlite")
        elif word == "/schema":
            from tasks.schema_text import schema_text

            self.console.print(schema_text(self.args.db, "", schema_tokens=10**6), markup=False)
        elif word == "/sql":
            env = self.make_env()
            env.reset(db_path=self.args.db)
            self.console.print(env.execute_sql(rest), style="dim", markup=False)
        elif word.startswith("/"):
            print(f"no command {word}\n{COMMANDS}")
        else:
            self.ask(line)

    def ask(self, question: str) -> None:
        from core.rollout import Episode
        from tasks.prepare import question_row

        row = question_row(self.recipe, question, self.args.db, self.args.task)
        row["prompt"] = [*self.before, *(row["prompt"][1:] if self.before else row["prompt"])]
        episode = Episode(row, self.make_env(), self.tokenizer, self.recipe.agent, on_message=self.show)
        try:
            with self.console.status("thinking"):
                for _ in self.engine.play([episode]):
                    pass
        finally:
            episode.on_message = None  # stopped: a query still running shows nothing in the next prompt
        if episode.error:
            forget = ". /reset forgets what was said: it may be more than the server takes" if self.before else ""
            raise UserError(
                f"the server failed: {episode.error}{forget if episode.error.startswith('BadRequestError') else ''}"
            )
        if episode.truncated:
            self.console.print("(cut off: agent.max_completion_length)", style="yellow")
        self.before = row["prompt"] + answered(episode.completion)

    def show(self, message: dict) -> None:
        if message["role"] == "user":  # what a workflow asks next, which repeats the result
            return
        if message["role"] == "tool":
            return self.console.print(message["content"], style="dim", markup=False)
        if message["content"]:
            self.console.print(message["content"], markup=False)
        for call in message.get("tool_calls") or []:
            arguments = ", ".join(str(v) for v in call["function"]["arguments"].values())
            self.console.print(f"-> {call['function']['name']}: {arguments}", style="cyan", markup=False)


def answered(completion: list[dict]) -> list[dict]:
    """Without a last call that got no result (the turn limit, or no room for it): servers refuse such a history."""
    *before, last = completion or [{}]
    if not last.get("tool_calls") or "turn" in last:  # a workflow's calls are text to the model
        return completion
    last = {key: value for key, value in last.items() if key != "tool_calls"}
    return [*before, last] if last["content"] else before


if __name__ == "__main__":
    run_step(main)
