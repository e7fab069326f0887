"""report.html: one page without network that shows a run, and comparisons of two runs.

    python -m core.report checkpoints/demo                    writes checkpoints/demo/eval/report.html, also while it trains
    python -m core.report compare demo demo-lr --stage grpo   paired statistics on the questions that both have answered

The page's parts stand in core/page/ and are inlined. What the models wrote reaches the browser as JSON and is shown as text
only; the page's policy allows no script but its own, by hash.
"""

import argparse
import base64
import gzip
import hashlib
import json
import math
import re
import statistics
import time
from pathlib import Path

import yaml

from core.artifacts import atomic_file, read_manifest
from core.compare import by_stage, compare, find_run, markdown, paired, read_lines, read_summary, show
from core.config import UserError, run_step
from core.evaluate import summarise, wilson
from core.table import tables

PAGE = Path(__file__).with_name("page")
SCRIPTS = ("dom.js", "messages.js", "results.js", "curves.js", "episodes.js", "main.js")
TRAINED = ("sft", "grpo")
UNPLOTTED = re.compile(r"step|time|epoch|total_flos|train_.*|(eval_)?num_tokens|eval_(runtime|.*_per_second)")
COLUMNS = {  # of the table, after accuracy: title -> (key of the summary, how it reads)
    "strict SQL": ("strict_accuracy", "{:.0%}"),
    "executable": ("executable_rate", "{:.0%}"),
    "format": ("format_rate", "{:.0%}"),
    "tool calls": ("tool_calls", "{:.2f}"),
    "tool errors": ("tool_error_rate", "{:.0%}"),
    "no tool": ("no_tool_rate", "{:.0%}"),
    "cut": ("truncated_rate", "{:.0%}"),
    "tokens": ("tokens", "{:.0f}"),
    "seconds": ("seconds", "{:.0f}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
}


def write_page(run_dir: str | Path, output: str | Path) -> Path:
    """report.html in `output`, from its episodes.jsonl and the curves under `run_dir`, as far as either is there."""
    run_dir, output = Path(run_dir), Path(output)
    stages = by_stage(output)
    curves = {s: c for s in TRAINED if (c := training_curves(run_dir / s))}
    if not stages and not curves:
        raise UserError(
            f"nothing to report: neither {output}/episodes.jsonl nor {run_dir}/{{sft,grpo}}/metrics.jsonl has anything in it."
            " Run: python step3_sft.py --config R, or python step5_eval.py --config R"
        )
    head = _head(run_dir, output)
    report = {
        "run": run_dir.resolve().name,
        "head": head,
        "stages": _results(stages),
        "curves": curves,
        "hints": _hints(curves),
        "episodes": len({id_ for records in stages.values() for id_ in records}),
    }
    report["table"] = _table(report["stages"])
    report["more"] = _more(read_summary(output), stages)
    path = output / "report.html"
    with atomic_file(path) as f:
        f.write(_page(f"{report['run']}: {head['model'] or 'report'}", report, _episodes(stages)))
    return path


def _page(title: str, report: dict, episodes: dict) -> str:
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    packed = gzip.compress(json.dumps(_finite(episodes), ensure_ascii=False).encode("utf-8", "replace"), mtime=0)
    parts = {
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        # as \u003c no text can end the element or open a comment; to JSON it is the same
        "report": json.dumps(_finite(report)).replace("<", "\\u003c"),
        "episodes": base64.b64encode(packed).decode(),
    }
    template = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _finite(value):
    """The same data, short: numbers of six digits, and null where a number is not one (JSON has no NaN)."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


# --------------------------------------------------------------------------------------------------------- the parts


def _head(run_dir: Path, output: Path) -> dict:
    """What was run, on what, from the manifests of the finished stages; the newest one speaks for all."""
    folders = {"SFT": run_dir / "sft", "GRPO": run_dir / "grpo", "evaluation": output}
    manifests = {name: m for name, folder in folders.items() if (m := read_manifest(folder))}
    last = list(manifests.values())[-1] if manifests else {}
    recipe = last.get("recipe", {})
    server = manifests.get("evaluation", {}).get("endpoint") or {}  # what was measured is then its model
    return {
        "model": server.get("served_model") or recipe.get("model", ""),
        "server": server.get("url", ""),
        "prompts": server.get("prompts", "").removeprefix("prompts: "),
        "tasks": ", ".join(f"{task} {weight:g}" for task, weight in recipe.get("tasks", {}).items()),
        "seed": last.get("seed"),
        "device": last.get("device", ""),
        "commit": last.get("commit", ""),
        "dirty": last.get("dirty", False),
        "versions": ({"python": last["python"]} if last else {}) | last.get("versions", {}),
        "recipe": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True) if recipe else "",
        "stages": [[name, m["seconds"]] for name, m in manifests.items()],
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }


def _results(stages: dict[str, dict]) -> list[dict]:
    """Figures of each stage, and its paired test against the stage before."""
    out, before = [], None
    for name, records in stages.items():
        figures = summarise(list(records.values()))
        for key in ("by_task", "by_hardness"):
            figures[key] = {k: [*pair, *wilson(*pair)] for k, pair in figures[key].items()}
        figures["strict_accuracy"] = figures["strict"]["accuracy"]
        test = {"against": before, **paired(stages[before], records)} if before else None
        out.append({"name": name, **figures, "test": test})
        before = name
    return out


def _table(results: list[dict]) -> dict:
    used = {title: column for title, column in COLUMNS.items() if any(s.get(column[0]) is not None for s in results)}
    cell = lambda value, form: "-" if value is None else form.format(value)  # noqa: E731
    return {"header": list(used), "rows": [[cell(s.get(key), form) for key, form in used.values()] for s in results]}


def _more(summary: dict, stages: dict[str, dict]) -> list[dict]:
    """The summary's other tables (turn limits, self-correction, samples), unless episodes have come since it was written."""
    counts = {name: s["n"] + s["undecided"] for name, s in summary.get("stages", {}).items()}
    if not counts or counts != {name: len(records) for name, records in stages.items()}:
        return []
    return [vars(t) for t in tables(summary) if t.title and t.header[0] != "part"]


def _hints(curves: dict) -> dict:
    missing = [s for s in TRAINED if s not in curves]
    return {
        "eval_text": "This run has not been evaluated yet. The table and the episodes come with",
        "eval": "python step5_eval.py --config R",
        "train": "python step3_sft.py --config R",
        "curves": [f"{s.upper()} has logged nothing yet." for s in missing if curves],
    }


def training_curves(folder: Path) -> dict | None:
    """Columns of metrics.jsonl by step. A resumed run logs some steps twice: what it logged last counts."""
    rows: dict[int, dict] = {}
    for line in read_lines(folder / "metrics.jsonl"):
        step = line["step"]
        rows = {s: row for s, row in rows.items() if s <= step}
        rows[step] = rows.get(step, {}) | line
    if not rows:
        return None
    steps = list(rows)
    names = dict.fromkeys(n for row in rows.values() for n, v in row.items() if isinstance(v, int | float))
    series = {n: [row.get(n) for row in rows.values()] for n in names if not UNPLOTTED.fullmatch(n)}
    if "step_time" in names:
        series["step_time"] = [row.get("step_time") for row in rows.values()]
    elif len(steps) > 1:
        series["step_time"] = _step_times(steps, [row["time"] for row in rows.values()])
    manifest = read_manifest(folder)
    return {
        "steps": steps,
        "series": {n: values for n, values in series.items() if any(v is not None for v in values)},
        "finished": manifest is not None,
        "seconds": manifest["seconds"] if manifest else None,
    }


def _step_times(steps: list[int], clock: list[float]) -> list[float | None]:
    """Seconds a step from the log's clock. A gap of twenty medians is a pause between two sessions, not a step."""
    found = [(b - a) / (t - s) for a, b, s, t in zip(clock, clock[1:], steps, steps[1:], strict=False)]
    usual = statistics.median(found)
    return [None, *(x if 0 <= x <= 20 * usual else None for x in found)]


def _episodes(stages: dict[str, dict]) -> dict:
    """Every question with what each stage made of it; a prompt that several share is kept once."""
    rows: dict[str, dict] = {}
    prompts: dict[str, int] = {}
    for stage, records in stages.items():
        for id_, record in records.items():
            row = rows.setdefault(
                id_,
                {k: record.get(k) or "" for k in ("id", "task", "hardness", "db_id", "question", "gold")}
                | {"stages": {}},
            )
            prompt = prompts.setdefault(json.dumps([_message(m) for m in record["prompt"]]), len(prompts))
            row["stages"][stage] = {
                "prompt": prompt,
                **{k: record.get(k) for k in ("correct", "answer", "rewards", "turns", "tool_calls", "tool_errors")},
                **{k: record.get(k) for k in ("tokens", "truncated", "seconds", "error")},
                "messages": [_message(m) for m in record["completion"]],
                "mask": _runs(record.get("mask") or []),
                "prompt_tokens": len(record.get("prompt_ids") or []),
            }
    order = sorted(rows.values(), key=lambda r: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", r["id"])])
    return {"prompts": [json.loads(p) for p in prompts], "rows": order}


def _message(message: dict) -> dict:
    content = message.get("content")
    content = (
        content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    )
    out = {"role": message["role"], "content": content}
    out |= {key: message[key] for key in ("name", "turn") if message.get(key)}
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        out["calls"] = [[f["name"], f["arguments"]] for f in functions]
    return out


def _runs(mask: list[int]) -> list[int]:
    """Lengths of the runs of a mask, beginning with the ones."""
    runs, value = [0], 1
    for m in mask:
        if m != value:
            runs.append(0)
            value = m
        runs[-1] += 1
    return runs if mask else []


# ------------------------------------------------------------------------------------------------------ command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run or its folder; or: compare RUN_A RUN_B")
    parser.add_argument(
        "--stage", nargs="+", metavar="S", help="compare: the stage of both runs, or of A and of B (default: the last)"
    )
    parser.add_argument("--output", metavar="FILE", help="compare: also write the comparison as Markdown")
    args = parser.parse_args()
    comparing = args.run[0] == "compare"
    if len(args.run) != (3 if comparing else 1) or (args.stage and (not comparing or len(args.stage) > 2)):
        parser.error("expected RUN, or compare RUN_A RUN_B [--stage S [S_OF_B]]")
    if not comparing:
        print(f"wrote {write_page(*find_run(args.run[0]))}")
        return
    found = compare(args.run[1], args.run[2], args.stage or [])
    show(found)
    if args.output:
        with atomic_file(args.output) as f:
            f.write(markdown(found))
        print(f"wrote {args.output}")


if __name__ == "__main__":
    run_step(main)
