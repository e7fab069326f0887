"""Rating prompts: kept on disk, resumed after a crash with the same figures, never taken over from other weights."""

import random
from dataclasses import dataclass, field

import pytest

from core.difficulty import easy_to_hard, rate, rated, rating_key, select


@dataclass
class Played:
    row: dict
    sample: int
    tokens: int = 2
    completion: list = field(default_factory=list)
    error: str = ""


class Model:
    """Solves a row with the probability in it; its luck hangs on row and sample only, as an engine's does."""

    def __init__(self, dies_after=None):
        self.played, self.dies_after = 0, dies_after

    def play(self, episodes):
        for episode in episodes:
            luck = random.Random(f"{episode.row['id']}-{episode.sample}").random()
            episode.completion.append(float(luck < episode.row["p"]))
        for start in range(0, len(episodes), 10):  # the samples of a prompt may lie in two batches
            if self.played == self.dies_after:
                raise KeyboardInterrupt
            self.played += len(episodes[start : start + 10])
            yield episodes[start : start + 10]


def judge(rows, completions):
    return [completion[0] for completion in completions]


def prompts(n, p=0.5):
    return [{"id": f"r{i}", "environment": "sql", "gold": "", "prompt": [{"content": f"q{i % 7}"}], "p": p, "hardness": "easy"}
            for i in range(n)]  # fmt: skip


def run(rows, path, model, key="weights", **options):
    rate(rows, 4, model.play, Played, judge, path, key, say=lambda text: None, **options)
    return {row["id"]: row["difficulty"] for row in rated(rows, path, key)}


def test_a_second_call_plays_nothing_and_other_weights_play_all(tmp_path):
    path, rows = tmp_path / "d" / "difficulty.jsonl", prompts(20)
    first = run(rows, path, Model())
    assert 0 < sum(first.values()) < 20 and all(4 * d == int(4 * d) for d in first.values())
    again, other = Model(), Model()
    assert run(rows, path, again) == first and again.played == 0
    run(rows, path, other, key="other weights")
    assert other.played == 80
    assert run(rows, path, Model()) == first


def test_a_changed_prompt_is_rated_again(tmp_path):
    path, rows = tmp_path / "difficulty.jsonl", prompts(4)
    run(rows, path, Model())
    rows[2] = rows[2] | {"gold": "SELECT 2"}
    model = Model()
    run(rows, path, model)
    assert model.played == 4


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_killed_and_started_again_gives_the_same_figures(tmp_path, cut):
    rows = prompts(20)
    whole = run(rows, tmp_path / "whole.jsonl", Model())
    path = tmp_path / "killed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(rows, path, Model(dies_after=50))
    text = path.read_bytes()
    path.write_bytes(text[: len(text) - cut])  # the crash came while the last line was written
    model = Model()
    assert run(rows, path, model) == whole
    assert model.played == (
        36 if cut == 30 else 32
    )  # 12 prompts were whole; without the line's end alone they still are


def test_processes_share_the_work_and_the_file(tmp_path):
    rows, path = prompts(20), tmp_path / "shared.jsonl"
    alone = run(rows, tmp_path / "alone.jsonl", Model())
    models = [Model(), Model()]
    rate(rows, 4, models[1].play, Played, judge, path, "weights", part=(1, 2), say=print)
    assert run(rows, path, models[0], part=(0, 2)) == alone
    assert [m.played for m in models] == [40, 40]


def test_what_the_judge_cannot_tell_is_no_failure(tmp_path):
    rows, path = prompts(3, p=1.0), tmp_path / "difficulty.jsonl"

    def unsure(rows, completions):
        return [None if row["id"] == "r0" else completion[0] for row, completion in zip(rows, completions, strict=True)]

    rate(rows, 4, Model().play, Played, unsure, path, "k", say=lambda text: None)
    assert [row["difficulty"] for row in rated(rows, path, "k")] == [0.5, 0.0, 0.0]


def test_an_episode_whose_database_was_away_is_no_failure(tmp_path):
    rows, path = prompts(2, p=1.0), tmp_path / "difficulty.jsonl"

    def episode(row, sample):
        return Played(row, sample, error="the database is away" if row["id"] == "r0" else "")

    rate(rows, 4, Model().play, episode, lambda rows, completions: [0.0] * len(rows), path, "k", say=lambda text: None)
    assert [row["difficulty"] for row in rated(rows, path, "k")] == [0.5, 1.0]


def graded(**numbers):
    levels = {"easy": 1.0, "extra": 0.0}
    rows = [{"id": f"{d}-{i}", "difficulty": float(d.replace("_", ".")), "hardness": "medium"}
            for d, n in numbers.items() for i in range(n)]  # fmt: skip
    return rows + [{"id": level, "difficulty": d, "hardness": level} for level, d in levels.items()]


def test_always_and_never_solved_are_left_out():
    rows = graded(**{"0": 5, "1": 6, "0_25": 3, "0_5": 2})
    kept, counts = select(rows, least=4)
    assert {row["difficulty"] for row in kept} == {0.25, 0.5} and len(kept) == 5
    assert counts["always solved"] == 6 and counts["never solved"] == 7 and counts["used"] == 5
    assert counts["by difficulty"] == {"0.0": 6, "0.25": 3, "0.5": 2, "1.0": 7}


def test_the_nearest_stay_where_too_few_remain():
    rows = graded(**{"0": 5, "1": 2, "0_5": 1})
    kept, counts = select(rows, least=5)
    assert counts["kept all the same"] == 4 and counts["used"] == len(kept) == 5
    names = [row["id"] for row in kept]
    assert "easy" in names and {"1-0", "1-1", "extra"} <= set(
        names
    )  # never solved: easy first; then always: hard first
    assert len(select(rows, least=99)[0]) == len(rows)


def test_a_short_run_goes_through_the_whole_range():
    rows = [{"id": i, "difficulty": d} for i, d in enumerate([0.75] * 30 + [0.25] * 30 + [0.5] * 30)]
    ordered = easy_to_hard(rows, 9)
    assert sorted(row["id"] for row in ordered) == list(range(90))
    assert [row["difficulty"] for row in ordered[:9]] == [0.25] * 3 + [0.5] * 3 + [0.75] * 3
    whole = easy_to_hard(rows, 90)
    assert [row["difficulty"] for row in whole] == [0.25] * 30 + [0.5] * 30 + [0.75] * 30
    assert [row["id"] for row in whole[:30]] == list(range(30, 60))  # equals keep their random order


def test_the_key_follows_the_weights_and_the_agent(tmp_path):
    from core.config import load_recipe

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    recipe = load_recipe("recipes/ci.yaml", ["--grpo.rate_difficulty", "4"])
    key = rating_key(recipe, str(tmp_path), 1.0)
    assert key == rating_key(recipe, str(tmp_path), 1.0) != rating_key(recipe, str(tmp_path), 0.7)
    recipe.agent.max_turns += 1
    assert rating_key(recipe, str(tmp_path), 1.0) != key
    recipe.agent.max_turns -= 1
    (tmp_path / "model.safetensors").write_bytes(b"weights!")
    assert rating_key(recipe, str(tmp_path), 1.0) != key


@pytest.mark.parametrize(("steps", "resample", "rated"), [(5, 0, (20, 45)), (5, 1, (40, 90)), (-1, 0, (100, 100))])
def test_no_more_prompts_are_rated_than_the_run_sees(tmp_path, monkeypatch, steps, resample, rated):
    from types import SimpleNamespace

    from core import difficulty
    from core.config import load_recipe

    words = ["--grpo.rate_difficulty", "4", "--grpo.resample", str(resample), "--data_root", str(tmp_path)]
    recipe, model, said = load_recipe("recipes/ci.yaml", words), Model(), []
    monkeypatch.setattr(difficulty, "open_source", lambda *_: (None, lambda temperature: model))
    monkeypatch.setattr(difficulty, "Episode", lambda row, env, tokenizer, agent, sample: Played(row, sample))
    arguments = SimpleNamespace(
        temperature=1.0, world_size=1, process_index=0, generation_batch_size=8, num_generations=4, max_steps=steps,
        gradient_accumulation_steps=2, steps_per_generation=2, num_iterations=1,
        distributed_state=SimpleNamespace(wait_for_everyone=lambda: None),
    )  # fmt: skip
    rows = prompts(100)
    for again in (False, True):
        model.played = 0
        kept, counts = difficulty.rated_prompts(
            recipe, rows, str(tmp_path), arguments, lambda name: None, judge, "", said.append
        )
        assert model.played == (0 if again else 4 * counts["rated"]) and rated[0] <= counts["rated"] <= rated[1]
        assert len(kept) == counts["used"] >= (2 * steps * (1 + resample) if steps > 0 else 80)
        assert all(0 < row["difficulty"] < 1 for row in kept)
    assert f"of {counts['rated']} prompts (100 there are), 4 samples each" in said[-1]


def test_what_counts_as_right_is_the_heaviest_reward():
    from rewards import main_reward

    assert main_reward("sql", {"executes": 0.1, "exec_match_strict": 1.0, "math_accuracy": 2.0}) == "exec_match_strict"
    assert main_reward("medical", {"medical_judge": 1.0, "medical_rule": 1.0}) == "medical_judge"
    assert main_reward("calculator", {"exec_match": 1.0}) == "math_accuracy"
