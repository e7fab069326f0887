"""Alarms fire on what they are for and keep silent on healthy runs; samples and logs stay whole and bounded."""

import json
import math
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from core.health import Alarms, Samples, _figures, cut_log  # noqa: E402


def run(held_out_rows=64, steps=40, **series):
    """Names of the alarms of a run whose metrics are functions of the step, and the steps at which they spoke."""
    alarms, spoke = Alarms(held_out_rows), []
    for step in range(steps):
        logs = {name: f(step) for name, f in series.items() if f(step) is not None}
        spoke += [(step, line.split(":")[1].strip()) for line in alarms.update(logs)]
    return spoke


def healthy(seed):
    """As a good run goes: reward climbs, entropy falls slowly, everything jitters."""
    rng = random.Random(seed)
    jitter = lambda base, by: max(0.0, base + rng.gauss(0, by))  # noqa: E731
    return {
        "reward": lambda s: jitter(0.2 + 0.01 * s, 0.05),
        "loss": lambda s: rng.gauss(0, 0.01),
        "grad_norm": lambda s: jitter(0.3, 0.1),
        "episode/tool_use": lambda s: min(1.0, jitter(0.95, 0.05)),
        "episode/parse_failures": lambda s: jitter(0.02, 0.01),
        "completions/clipped_ratio": lambda s: jitter(0.05, 0.02),
        "entropy": lambda s: jitter(0.5 - 0.006 * s, 0.03),
        "frac_reward_zero_std": lambda s: min(1.0, jitter(0.4, 0.15)),
        "held_out/accuracy": lambda s: None if s % 5 else min(1.0, jitter(0.4 + 0.004 * s, 0.03)),
    }


@pytest.mark.parametrize("seed", range(30))
def test_silent_on_healthy_runs(seed):
    assert run(**healthy(seed)) == []


@pytest.mark.parametrize(
    ("metric", "values", "alarm"),
    [
        ("episode/tool_use", lambda s: 0.9 if s < 20 else 0.2, "tool use collapses"),
        ("episode/tool_use", lambda s: max(0.0, 0.9 - 0.03 * s), "tool use collapses"),
        ("episode/parse_failures", lambda s: 0.02 + 0.01 * s, "parse failures climb"),
        ("entropy", lambda s: 0.5 * 0.9**s, "entropy collapses"),
        ("completions/clipped_ratio", lambda s: min(1.0, 0.04 * s), "truncation climbs"),
        (
            "held_out/accuracy",
            lambda s: None if s % 5 else (0.5 if s < 15 else 0.3),
            "reward rises, held-out accuracy falls",
        ),
        ("frac_reward_zero_std", lambda s: 1.0, "no group has spread"),
        ("loss", lambda s: math.nan if s == 30 else 0.1, "loss is not a number"),
        ("grad_norm", lambda s: math.inf if s == 3 else 0.1, "loss is not a number"),
        ("eval_tool_use", lambda s: 0.1 if s == 10 else None, "no tool calls on held-out rows"),
    ],
)
def test_each_alarm_speaks_once_and_alone(metric, values, alarm):
    spoke = run(**(healthy(0) | {metric: values}))
    assert [name for _, name in spoke] == [alarm]


def test_entropy_may_fall_in_sft():
    """As the demo's does in 16 steps; its log has no reward."""
    assert run(steps=16, loss=lambda s: 1.4 * 0.8**s, entropy=lambda s: 1.2 * 0.8**s) == []


def test_a_collapse_is_told_within_a_few_steps_and_again_if_it_comes_back():
    use = lambda s: 0.1 if 20 <= s < 30 or s >= 45 else 0.9  # noqa: E731
    spoke = run(steps=60, **{"episode/tool_use": use})
    assert [name for _, name in spoke] == ["tool use collapses"] * 2
    assert spoke[0][0] <= 24 and spoke[1][0] <= 49


@pytest.mark.parametrize("rows", [8, 64])
def test_a_small_held_out_set_may_waver(rows):
    """A fall within the standard error of so few rows is no fall; nor is one while the reward falls too."""
    wave = lambda s: None if s % 5 else 0.5 - (0.05 if s >= 15 else 0.0)  # noqa: E731
    assert run(held_out_rows=rows, **(healthy(1) | {"held_out/accuracy": wave})) == []
    falling = {
        "held_out/accuracy": lambda s: None if s % 5 else (0.5 if s < 15 else 0.2),
        "reward": lambda s: 0.9 - 0.01 * s,
    }
    assert run(held_out_rows=rows, **(healthy(1) | falling)) == []


def test_every_alarm_says_what_to_change():
    for rule in Alarms().rules:
        assert any(word in rule.text for word in ("grpo.", "agent.", "data.", "sft.", "learning rate")), rule.name


def test_figures_of_an_episode():
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    results = [{"role": "tool", "content": c} for c in ("Error: no such column", "{'error': 'x'}", "1 row")]
    broken = {"role": "assistant", "content": '<tool_call>\n{"name": "execute_sql", }\n</tool_call>'}
    made = _figures([call, results[0], call, results[1], call, results[2], broken])
    assert made == {"episodes": 1, "turns": 4, "tool_use": True, "parse_failures": True, "results": 3, "errors": 2}
    assert _figures([])["tool_use"] is False


def sample_file(tmp_path, most=40):
    return Samples(tmp_path, SimpleNamespace(max_turns=3), None, most=most)


def test_samples_stay_bounded_and_span_the_run(tmp_path):
    samples = sample_file(tmp_path)
    for step in range(0, 1000, 10):
        samples.add(step, [{"id": f"{step}-{i}"} for i in range(8)])
    kept = [json.loads(line)["step"] for line in samples.path.read_text().splitlines()]
    assert len(kept) <= 40 and kept == sorted(kept) and max(kept) == 990 and len(set(kept)) > 2 and min(kept) == 0
    samples.add(500, [{"id": "again"}])  # a run resumed from step 500 repeats what came after
    assert max(json.loads(line)["step"] for line in samples.path.read_text().splitlines()) == 500
    samples.add(500, [{"id": "held out"}])  # both come at a step whose checkpoint is saved
    samples.add(500, [{"id": "again"}])
    last = [json.loads(line) for line in samples.path.read_text().splitlines()][-2:]
    assert last == [{"step": 500, "id": "held out"}, {"step": 500, "id": "again"}]
    samples.add(510, [{"id": str(i)} for i in range(100)])
    assert len(samples.path.read_text().splitlines()) == 40


def test_log_of_a_resumed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": s}) + "\n" for s in range(1, 9)) + '{"step": 9, "lo')
    assert [r["step"] for r in cut_log(path, 6)] == [1, 2, 3, 4, 5, 6]
    assert path.read_text().count("\n") == 6 and cut_log(tmp_path / "none.jsonl", 3) == []
