"""report.html as a file: what goes into it and how it is packed. tests/test_report_page.py opens it in a browser."""

import base64
import gzip
import json
import re

import pytest

from core.config import UserError
from core.report import training_curves, write_page
from tests.report_runs import episode, write_curves, write_episodes, write_lines, write_manifest


def unpack(path):
    text = path.read_text(encoding="utf-8")
    parts = dict(re.findall(r'<script type="[a-z/]+" id="([a-z-]+)">(.*?)</script>', text, re.DOTALL))
    return json.loads(parts["report-data"]), json.loads(gzip.decompress(base64.b64decode(parts["episode-data"])))


def test_page_holds_figures_curves_and_episodes(tmp_path):
    run = write_curves(
        write_episodes(tmp_path / "demo", {"base": [False] * 8, "sft": [True, None] + [False, True] * 3})
    )
    write_manifest(run / "sft")
    report, data = unpack(write_page(run, run / "eval"))
    base, sft = report["stages"]
    assert (base["name"], base["test"], base["accuracy"]) == ("base", None, 0.0)
    assert (sft["n"], sft["undecided"], sft["correct"], sft["test"]["fixed"], sft["test"]["n"]) == (7, 1, 4, 4, 7)
    assert sft["by_hardness"]["easy"][:2] == [1, 2] and len(report["table"]["rows"][0]) == len(
        report["table"]["header"]
    )
    assert report["head"]["model"] == "org/model" and report["head"]["stages"] == [["SFT", 517.4]]
    assert report["curves"]["sft"]["finished"] and not report["curves"]["grpo"]["finished"]
    assert [r["id"] for r in data["rows"]] == [f"dev-{i}" for i in range(8)]
    assert len(data["prompts"]) == 8  # one a question, not one a stage
    seen = data["rows"][1]["stages"]["sft"]
    assert (
        seen["correct"] is None and seen["mask"] == [20, 15, 10] and seen["messages"][0]["calls"][0][0] == "execute_sql"
    )


def test_a_servers_page_names_the_server_and_what_it_reads(tmp_path):
    run = write_episodes(tmp_path / "demo", {"served": [True, False]})
    server = {"url": "http://host:8000/v1", "served_model": "other/model", "prompts": "warning: another template"}
    write_manifest(run / "sft")
    write_manifest(run / "eval", endpoint=server)
    report, _ = unpack(write_page(run, run / "eval"))
    head = report["head"]
    assert (head["model"], head["server"], head["prompts"]) == ("other/model", server["url"], server["prompts"])


def test_only_the_greedy_episode_with_the_most_turns_is_shown(tmp_path):
    rows = [episode("a", "sft", False, max_turns=t, sample=s) for t, s in ((1, 0), (3, 1))]
    rows.insert(1, episode("a", "sft", True, max_turns=3))
    write_lines(tmp_path / "eval" / "episodes.jsonl", rows)
    report, data = unpack(write_page(tmp_path, tmp_path / "eval"))
    assert report["stages"][0]["n"] == 1 and data["rows"][0]["stages"]["sft"]["correct"] is True


def test_text_of_a_model_cannot_leave_its_element(tmp_path):
    evil = "</script><script>window.pwned=1</script><!--<script>{{script}}"
    write_lines(
        tmp_path / "eval" / "episodes.jsonl", [episode(evil, evil, True, question=evil, task=evil, hardness=evil)]
    )
    write_lines(tmp_path / "sft" / "metrics.jsonl", [{"step": 1, "time": 1.0, evil: 2.0}])
    path = write_page(tmp_path, tmp_path / "eval")
    text = path.read_text(encoding="utf-8")
    assert text.count("<script") == 3 == text.count("</script>") and "window.pwned" in text
    report, data = unpack(path)
    assert report["stages"][0]["name"] == evil == data["rows"][0]["id"] and evil in report["curves"]["sft"]["series"]


def test_page_needs_no_other_file_and_its_policy_names_its_own_parts(tmp_path):
    text = write_page(write_curves(tmp_path), tmp_path / "eval").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "unsafe-inline" not in text and "{{" not in text.split("<body>")[0]
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\(""", text)


def test_curves_while_training_and_nothing_at_all(tmp_path):
    report, data = unpack(write_page(write_curves(tmp_path / "run"), tmp_path / "run" / "eval"))
    assert report["stages"] == [] and data["rows"] == [] and set(report["curves"]) == {"sft", "grpo"}
    with pytest.raises(UserError, match=r"nothing to report.*step3_sft\.py"):
        write_page(tmp_path / "empty", tmp_path / "empty" / "eval")
    assert not (tmp_path / "empty").exists()


def test_curves_of_a_resumed_run(tmp_path):
    """Killed after step 4, resumed from 2, killed while it wrote a line: what was logged last counts."""
    first = [{"step": s, "time": 10.0 * s, "loss": 1.0} for s in (1, 2, 3, 4)]
    again = [{"step": 3, "time": 5000.0, "loss": 0.5, "eval_loss": float("nan")}]
    write_lines(tmp_path / "metrics.jsonl", first + again)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "ti')
    curves = training_curves(tmp_path)
    assert curves["steps"] == [1, 2, 3] and curves["series"]["loss"] == [1.0, 1.0, 0.5]
    assert curves["series"]["step_time"][1] == 10.0 and not curves["finished"]
    assert training_curves(tmp_path / "none") is None


def test_a_pause_between_two_sessions_is_no_step(tmp_path):
    clock = [1.0, 2.0, 3.0, 4.0, 9000.0, 9001.0]
    write_lines(tmp_path / "metrics.jsonl", [{"step": i, "time": t, "loss": 1} for i, t in enumerate(clock)])
    assert training_curves(tmp_path)["series"]["step_time"] == [None, 1.0, 1.0, 1.0, None, 1.0]


def test_not_a_number_is_null(tmp_path):
    write_lines(tmp_path / "sft" / "metrics.jsonl", [{"step": 1, "time": 1.0, "loss": float("inf")}])
    write_episodes(tmp_path, {"sft": [None, None]})
    report, _ = unpack(write_page(tmp_path, tmp_path / "eval"))
    assert report["curves"]["sft"]["series"]["loss"] == [None] and report["stages"][0]["accuracy"] is None
