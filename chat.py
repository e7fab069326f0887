"""Talk to a stage, an export or an endpoint: the same loop, tools and sandbox as in training.

python chat.py --config recipes/demo.yaml --db shop.sqlite
python chat.py --config recipes/demo.yaml --stage sft --task mini_math --question "What is 37 * 48?"
python chat.py --config R --db shop.sqlite --endpoint http://localhost:8000/v1 --served_model NAME
"""

from pathlib import Path

from core.config import UserError, load_recipe_args, run_step


def add_arguments(parser):
    parser.add_argument("--stage", default="grpo", help="base, sft, grpo or a model folder (default grpo)")
    parser.add_argument("--db", help="a SQLite file to ask about")
    parser.add_argument("--task", help="talk to this task's agent instead of a database's, e.g. gsm8k")
    parser.add_argument("--question", help="ask once and stop")
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server instead of a stage")
    parser.add_argument("--served_model", metavar="NAME", help="the model's name at the endpoint")


def main():
    recipe, args = load_recipe_args(__doc__, add_arguments)
    if bool(args.db) == bool(args.task):
        raise UserError("name one of --db FILE.sqlite or --task NAME")
    if args.db and not Path(args.db).is_file():
        raise UserError(f"no database file '{args.db}'")
    if args.endpoint and not args.served_model:
        raise UserError("--endpoint needs --served_model NAME")
    from core.models import load_model, load_tokenizer, stage_source
    from core.rollout import EndpointEngine, Episode, TransformersEngine
    from envs import ENVIRONMENTS
    from tasks.prepare import environment_limits, question_row

    if args.endpoint:
        tokenizer, engine = None, EndpointEngine(args.endpoint, args.served_model)
    else:
        source = stage_source(recipe, args.stage)
        tokenizer = load_tokenizer(source)
        engine = TransformersEngine(load_model(source), tokenizer, batch_size=1)
    while True:
        try:
            question = args.question or input("question> ").strip()
        except EOFError:
            return
        if not question:
            return
        row = question_row(recipe, question, args.db, args.task)
        env = ENVIRONMENTS[row["environment"]](**environment_limits(recipe, row["environment"]))
        for _ in engine.play([Episode(row, env, tokenizer, recipe.agent, on_message=show)]):
            pass
        if args.question:
            return


def show(message: dict) -> None:
    from rich.console import Console

    console = Console()
    if message["role"] == "user":  # what a workflow asks next, which repeats the result
        return
    if message["role"] == "tool":
        console.print(message["content"], style="dim", markup=False, highlight=False)
        return
    if message["content"]:
        console.print(message["content"], markup=False, highlight=False)
    for call in message.get("tool_calls") or []:
        arguments = ", ".join(str(v) for v in call["function"]["arguments"].values())
        console.print(f"-> {call['function']['name']}: {arguments}", style="cyan", markup=False, highlight=False)


if __name__ == "__main__":
    run_step(main)
