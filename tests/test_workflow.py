"""The workflow agent: its turns, prompts and limits, what counts as its answer, and which of its tokens are trained."""

import json
from pathlib import Path

import pytest

from core import workflow
from core.chat import visible
from core.config import Agent, RecipeError, Workflow, load_recipe
from core.workflow import KEEP, REDO, from_tool_calls, keeps, query_of, respond, trained_mask

RIGHT = "SELECT name FROM customer WHERE city = 'Paris'"
WRONG = "SELECT name FROM customer WHERE city = 'paris'"
TURNS = [f"```sql\n{WRONG}\n```", f"No rows: cities have a capital.\n{REDO}", f"```sql\n{RIGHT}\n```", f"Fine.\n{KEEP}"]


def env_for(row, **limits):
    from envs import ENVIRONMENTS

    env = ENVIRONMENTS["sql"](**limits)
    env.reset(**row)
    return env


def play(row, turns, max_turns=3, **limits):
    """The messages of an episode whose assistant says `turns`."""
    env, completion = env_for(row, **limits), []
    for text in turns:
        message = {"role": "assistant", "content": text}
        replies = respond(completion, message, env, max_turns)
        completion += [message, *replies]
        if not visible(replies):
            break
    return completion


def test_write_execute_check_rewrite(sql_row):
    completion = play(sql_row, TURNS)
    names = [(m["role"], m["turn"]) for m in completion]
    assert names == [
        ("assistant", "write"), ("tool", "write"), ("user", "check"), ("assistant", "check"),
        ("user", "rewrite"), ("assistant", "rewrite"), ("tool", "rewrite"), ("user", "check"), ("assistant", "check"),
    ]  # fmt: skip
    assert "Ann" in completion[6]["content"] and completion[6]["content"] in completion[7]["content"]
    seen = visible(completion)
    assert [m["role"] for m in seen] == ["assistant", "user"] * 3 + ["assistant"]
    assert not any("tool_calls" in m for m in seen) and seen[0]["content"] == TURNS[0]


def test_rewards_read_it_as_any_episode(sql_row):
    from rewards import score

    right = score(sql_row, play(sql_row, TURNS))
    assert right["exec_match"] == right["executes"] == right["sql_format"] == right["turn_economy"] == 1.0
    wrong = score(sql_row, play(sql_row, [TURNS[0], f"Looks fine.\n{KEEP}"]))
    assert wrong["exec_match"] == 0.0 and wrong["sql_format"] == 1.0


def test_a_turn_without_a_query_is_asked_again(sql_row):
    from rewards import score

    completion = play(sql_row, ["I do not know.", f"Fine.\n{KEEP}", TURNS[2], f"Fine.\n{KEEP}"])
    said = [(m["turn"], "tool_calls" in m) for m in completion if m["role"] == "assistant"]
    assert said == [("write", False), ("check", False), ("rewrite", True), ("check", False)]
    assert workflow.NO_QUERY in completion[1]["content"] and sum(m["role"] == "tool" for m in completion) == 1
    assert score(sql_row, play(sql_row, ["I do not know."], max_turns=1))["sql_format"] == 0.0


def test_a_check_is_no_way_to_answer(sql_row):
    """The check carries no loss: a query in it must not be the answer that another turn is paid for."""
    from rewards import score

    sly = play(sql_row, [TURNS[0], f"Better:\n```sql\n{RIGHT}\n```\n{KEEP}"])
    assert sly[-1]["turn"] == "rewrite" and score(sql_row, sly)["exec_match"] == 0.0
    quoted = play(sql_row, [TURNS[2], f"```sql\n{RIGHT.replace(' FROM', chr(10) + 'FROM')}\n```\n{KEEP}"])
    assert len(quoted) == 4  # the same query, quoted, is kept


def test_the_last_query_has_no_check(sql_row):
    completion = play(sql_row, [TURNS[0], TURNS[1], TURNS[0], "never asked for"], max_turns=2)
    assert [m["turn"] for m in completion if m["role"] == "assistant"] == ["write", "check", "rewrite"]
    (untested,) = play(sql_row, TURNS, max_turns=0)  # as step 5 --turns 0 plays it: nothing is run
    assert "tool_calls" not in untested
    assert completion[-1]["role"] == "tool" and "no queries left" not in completion[-1]["content"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"All columns are there.\n{KEEP}", True),
        ("**Verdict:** Keep", True),
        (f"A join is missing.\n{REDO}", False),
        ("Seems right to me.", False),  # no verdict
        (f"The last line is '{KEEP}' or '{REDO}'.", False),  # the instruction, repeated
    ],
)
def test_verdicts(text, kept):
    assert keeps(text, RIGHT) is kept


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("First ```sql SELECT 1``` then\n```SQLite\nSELECT 2\n``` is it.", "SELECT 2"),
        ("```\nSELECT 3\n```", "SELECT 3"),
        ("```sql\nSELECT 4", "SELECT 4"),  # cut
        ("with t as (select 1) select * from t", "with t as (select 1) select * from t"),
        ("The answer is 7.", ""),
    ],
)
def test_query_of(text, query):
    assert query_of(text) == query


def test_results_and_schema_are_cut_by_the_recipe(sql_row, shop_db):
    from tasks.prepare import environment_limits, question_row

    recipe = load_recipe("recipes/ci.yaml", ["--agent.workflow.execution_truncate", "200",
                                             "--agent.workflow.table_info_truncate", "200",
                                             "--agent.max_rows", "50"])  # fmt: skip
    everything = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 400) SELECT i, 'long text' FROM n"
    )
    completion = play(sql_row, [everything], **environment_limits(recipe, "sql"))
    assert len(completion[1]["content"]) <= 200 and "400 rows" in completion[1]["content"]
    prompt = question_row(recipe, "Who lives in Paris?", shop_db, None)["prompt"]
    schema, _, rest = prompt[1]["content"].partition("\n\nQuestion: ")
    assert 0 < len(schema) <= 200 and rest == f"Who lives in Paris?\n\n{workflow.WRITE}"
    assert "execute_sql" not in prompt[0]["content"]


def test_worked_examples_come_from_the_same_trajectories(sql_row):
    """Gold and corrections, made by running them, in the form in which a rollout would have played them."""
    import random

    from rewards.exec_match import exec_match
    from tasks import TASKS

    env = env_for(sql_row)
    gold = from_tool_calls(TASKS["spider"].trajectory(sql_row, env))
    assert [m["turn"] for m in gold] == ["write", "write", "check", "check"] and gold[-1]["content"].endswith(KEEP)
    mended = from_tool_calls(TASKS["spider"].correct(sql_row, env, random.Random(0)))
    said = [m for m in mended if m["role"] == "assistant"]
    assert [m["turn"] for m in said] == ["write", "check", "rewrite", "check"]
    assert [m.get("train", True) for m in said] == [False, True, True, True]
    assert said[1]["content"].endswith(REDO) and len(said[1]["content"]) > len(REDO) + 10
    assert exec_match(query_of(said[0]["content"]), sql_row["gold"], sql_row["db_path"]).correct is False
    for example in (gold, mended):
        plain = [{k: v for k, v in m.items() if k != "train"} for m in example]
        assert play(sql_row, [m["content"] for m in example if m["role"] == "assistant"]) == plain


@pytest.mark.parametrize(
    ("trained", "mask"),
    [("write|rewrite", "110000110"), ("write", "110000000"), ("check", "000110000"), (".*", "110110110")],
)
def test_trained_mask(trained, mask):
    completion = [{"role": r, "turn": t} for r, t in
                  (("assistant", "write"), ("tool", "write"), ("user", "check"), ("assistant", "check"),
                   ("user", "rewrite"), ("assistant", "rewrite"))]  # fmt: skip
    assert trained_mask([1, 1, 0, 1, 1, 0, 1, 1, 0], completion, trained) == [int(x) for x in mask]


@pytest.mark.parametrize(
    ("setting", "says"),
    [("trained_turns writ", "matches none of write, check, rewrite"), ("trained_turns write(", "no regular expression"),
     ("execution_truncate 10", "200 at least"), ("max_turns 3", "unknown key")],
)  # fmt: skip
def test_bad_settings(setting, says):
    key, value = setting.split()
    with pytest.raises(RecipeError, match=says):
        load_recipe("recipes/ci.yaml", [f"--agent.workflow.{key}", value])


def test_a_recipe_without_it_is_written_as_before():
    assert "workflow" not in load_recipe("recipes/ci.yaml").to_dict()["agent"]
    with_it = load_recipe("recipes/ci.yaml", ["--agent.workflow", "{}"]).to_dict()["agent"]["workflow"]
    assert with_it["trained_turns"] == "write|rewrite"


# ---- with a tokenizer and a model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tests.tiny_model import build_tiny_model

    home = tmp_path_factory.mktemp("workflow")
    return build_tiny_model(home / "tiny", home / "data" / "raw")


@pytest.fixture
def flow_row(sql_row):
    return sql_row | {"prompt": workflow.first_prompt(sql_row["prompt"])}


def test_a_database_that_is_away_is_told_to_the_trainer(sql_row):
    env = env_for(sql_row)
    desk = workflow.trl_arguments(Agent(), [], {"sql": lambda: env})["environment_factory"]["sql"]()
    desk.reset(**sql_row)
    assert desk.trouble == ""
    Path(f"{sql_row['db_path']}-wal").write_text("changes")
    assert "not available" in env.execute_sql(RIGHT) and "-wal is not empty" in desk.trouble


@pytest.mark.slow
def test_rollout_ids_are_those_of_sft(tiny, flow_row):
    from core.chat import render
    from core.checks import check_rendering
    from core.endpoint import to_openai
    from core.models import load_tokenizer
    from core.rollout import Episode

    tokenizer = load_tokenizer(str(tiny))
    episode = Episode(flow_row, env_for(flow_row), tokenizer, Agent(workflow=Workflow(), max_completion_length=2000))
    for text in TURNS:
        going_on = episode.accept(tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"])
    assert going_on is None and not episode.truncated and episode.turns == 4
    ids, mask = render(tokenizer, flow_row["prompt"] + episode.completion, episode.tools)
    played = episode.prompt_ids + episode.completion_ids
    assert played == ids[: len(played)] and mask[len(episode.prompt_ids) : len(played)] == episode.mask
    assert "tool_call" not in tokenizer.decode(played)
    check_rendering(tokenizer, flow_row | {"messages": flow_row["prompt"] + episode.completion}, None)
    wire = to_openai(flow_row["prompt"] + episode.completion)  # what a server is sent, and renders to the same ids
    assert tokenizer.apply_chat_template(wire, return_dict=False)[: len(played)] == played


@pytest.mark.slow
def test_no_room_for_a_check_keeps_the_result(tiny, flow_row):
    from core.models import load_tokenizer
    from core.rollout import Episode

    tokenizer = load_tokenizer(str(tiny))
    episode = Episode(flow_row, env_for(flow_row), tokenizer, Agent(workflow=Workflow(), max_completion_length=120))
    assert episode.accept(tokenizer(f"{TURNS[0]}<|im_end|>", add_special_tokens=False)["input_ids"]) is None
    assert episode.truncated and [m["role"] for m in episode.completion] == ["assistant", "tool"]


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["write|rewrite", "check"])
def test_only_trained_turns_get_gradient(tiny, flow_row, tmp_path, trained):
    """A real GRPO step over scripted turns: the loss moves with the log-probabilities of the trained turns, of no other."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig

    from core.grpo import GroupTrainer
    from core.models import load_model, load_tokenizer
    from core.train import common_arguments
    from rewards import REWARDS

    recipe = load_recipe("recipes/ci.yaml", ["--agent.workflow.trained_turns", trained])
    tokenizer = load_tokenizer(str(tiny))
    agent = Agent(workflow=recipe.agent.workflow, max_completion_length=1500)
    config = common_arguments(recipe, tmp_path) | {
        "num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1, "report_to": "none",
        "max_completion_length": 1500,
    }  # fmt: skip
    trainer = GroupTrainer(
        model=load_model(str(tiny)), args=GRPOConfig(**config), train_dataset=Dataset.from_list([flow_row] * 2),
        processing_class=tokenizer,
        **workflow.trl_arguments(agent, [REWARDS["exec_match"]], {"sql": lambda: env_for(flow_row)}),
    )  # fmt: skip
    scripts = [list(TURNS), [TURNS[0], f"Fine.\n{KEEP}"]]  # one right, one wrong: a group with an advantage

    def scripted(contexts, images, fields, group):
        first = max(len(s) for s in scripts) if group > 1 else 0
        live = [s for s in scripts if s]
        assert len(contexts) == len(live) and (group == 2) == (first == 4)
        texts = [s.pop(0) for s in live]
        return [tokenizer(f"{t}<|im_end|>", add_special_tokens=False)["input_ids"] for t in texts], None

    trainer._generate_single_turn = scripted
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(flow_row), dict(flow_row)])
    assert sorted(batch["advantages"].tolist())[0] < 0 < sorted(batch["advantages"].tolist())[1]

    score = trainer._get_per_token_logps_and_entropies
    kept = []

    def watched(*args, **kwargs):
        out = score(*args, **kwargs)
        out[0].retain_grad()
        kept.append(out[0])
        return out

    trainer._get_per_token_logps_and_entropies = watched
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch).backward()
    for row, ids, gradient in zip((0, 1), batch["completion_ids"], kept[-1].grad, strict=True):
        moved = ids[gradient != 0].tolist()
        wanted = [TURNS, [TURNS[0], f"Fine.\n{KEEP}"]][row]
        names = ["write", "check", "rewrite", "check"]
        texts = [t for t, name in zip(wanted, names, strict=False) if name in trained.split("|")]
        expected = [i for t in texts for i in tokenizer(f"{t}<|im_end|>", add_special_tokens=False)["input_ids"]]
        assert moved == expected, tokenizer.decode(torch.tensor(moved))


@pytest.mark.slow
def test_all_steps(tiny):
    """Data, SFT, GRPO, evaluation and chat as a user runs them; the tiny model writes noise, the machinery does not."""
    from tests.test_smoke import run

    home = tiny.parent
    words = ["--config", "recipes/ci.yaml", "--model", str(tiny), "--data_root", str(home / "data"), "--run", "flow",
             "--checkpoint_root", str(home / "ck"), "--tasks", "{mini_sql: 1.0}", "--data.max_length", "1100",
             "--agent", "{max_turns: 2, max_completion_length: 620, workflow: {table_info_truncate: 300}}",
             "--grpo.rewards", "{exec_match: 1.0, sql_format: 0.1}", "--data.correction_share", "0.5"]  # fmt: skip
    run("step2_prepare_data.py", *words)
    rows = [json.loads(x) for x in (home / "data/flow/sft_train.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {m["turn"] for r in rows for m in r["messages"][2:]} == {"write", "check", "rewrite"}
    assert "self-checks pass on 16 real rows" in run("step3_sft.py", *words)
    run("step4_grpo.py", *words)
    assert (home / "ck/flow/grpo/manifest.json").exists()
    assert "| grpo | 8 |" in run("step5_eval.py", *words)
    episodes = [json.loads(x) for x in (home / "ck/flow/eval/episodes.jsonl").read_text().splitlines()]
    assert all(e["completion"][0]["turn"] == "write" for e in episodes)
    db = next((home / "data/raw/mini_sql/database").rglob("*.sqlite"))
    assert "error:" not in run("chat.py", *words, "--stage", "sft", "--db", str(db), "--question", "How many rows?")
    assert "workflow agent writes SQL" in run("step2_prepare_data.py", *words, "--tasks", "{mini_math: 1.0}", code=1)
