"""Each exported file in its own engine, on questions that the stage itself answers too.

Passed is a file that is asked with the ids of training (Ollama shows only how many) and then says what the stage says, or
stays within the stage's 95 % interval in accuracy and in tool use (quantised weights speak a little differently). A stage
that answers nothing right and calls no tool has no such interval: then a file with other episodes is unproven, and failed
if no episode is the same. What needs an engine that is not here is said to be unverified.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core import llama_server
from core.artifacts import atomic_file, write_jsonl
from core.chat import prompt_ids
from core.config import Recipe, UserError
from core.endpoint import EndpointEngine, to_openai
from core.episodes import records_of
from core.evaluate import proportion
from core.models import as_url
from core.rollout import TransformersEngine
from core.served import server_ids
from core.table import Table, markdown, share, show

OLLAMA = "Install it from ollama.com, then: ollama serve"
LORA = "Apply it to the base model's GGUF: llama-server --lora; the folder adapter/ holds the same and can be verified"


Prompt = list[int] | int | None  # its ids, else how many they are, else nothing


@dataclass
class Opened:
    """A model in its engine, ready to be asked."""

    name: str  # of the engine
    engine: Any
    tokenizer: Any  # None: the engine renders and tokenises by itself
    ids_of: Callable[[list[dict], list[dict]], Prompt]  # messages, tools -> what it shows of the prompt
    load_seconds: float


@dataclass
class Finding:
    name: str  # of the format; "stage" is what the others are compared with
    engine: str = ""
    size: int = 0  # bytes
    load_seconds: float = 0.0
    seconds: float = 0.0
    records: list[dict] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    missing: str = ""  # how to get the engine that is not here
    problem: str = ""
    unproven: str = ""  # why this is neither a pass nor a failure


def verify(
    recipe: Recipe,
    source: str,  # the stage's model folder
    files: dict[str, Path],  # format -> what was exported
    rows: list[dict],
    make_episode: Callable,  # row, tokenizer -> Episode
    judge: Any,  # the package `rewards`, which core does not import
    folder: Path,  # verify.md and verify.jsonl go there
    stage: str = "",  # its name, for verify.md
    say: Callable[[str], None] = print,
) -> list[Finding]:
    """Prints the table; a file that speaks otherwise is a UserError that shows the first episode that differs."""
    if not rows:
        raise UserError(
            "--verify has no question to ask: the evaluation rows are empty. Run step2_prepare_data.py again"
        )
    findings = []
    for name, path in ({"stage": Path(source)} | files).items():
        finding = Finding(name, size=_size(path), missing=_missing(name))
        findings.append(finding)
        if not finding.missing:
            say(f"  verifying {name}: {len(rows)} episodes with {path}")
            _play(finding, _open(recipe, name, path, source), rows, make_episode, judge)
        finding.problem = _problem(findings[0], finding)
        if not finding.problem:
            finding.unproven = _unproven(findings[0], finding)
        if finding.records and None in finding.prompts:
            say(f"{name}: {finding.engine} shows neither ids nor counts of its prompts, so they are not compared")
    _write(folder, findings, (f"stage {stage}: " if stage else "") + f"{source}, {len(rows)} questions")
    for finding in findings:
        if finding.missing:
            say(f"not verified: {finding.name}. {finding.missing}")
        elif finding.unproven:
            say(f"unproven: {finding.name}. {finding.unproven}")
    if failed := [f for f in findings if f.problem]:
        first = failed[0]
        raise UserError(
            "; ".join(f"{f.name} does not speak as the stage does: {f.problem}" for f in failed)
            + (f"\n{first_difference(findings[0], first)}" if first.records else "")
        )
    return findings


def _missing(name: str) -> str:
    """How to get what verifying needs and is not here; empty where all is."""
    if name == "gguf-lora":
        return LORA
    if name.startswith("gguf") and not llama_server.installed():
        return llama_server.INSTALL
    return OLLAMA if name == "ollama" and shutil.which("ollama") is None else ""


@contextlib.contextmanager
def _open(recipe: Recipe, name: str, path: Path, source: str) -> Iterator[Opened]:
    began = time.perf_counter()
    if name in ("stage", "hf", "adapter"):
        from core.models import load_model, load_tokenizer

        tokenizer = load_tokenizer(str(path))
        if name != "stage":  # what the folder holds, and not what load_tokenizer puts in its place
            from transformers import AutoTokenizer

            tokenizer.chat_template = AutoTokenizer.from_pretrained(path).chat_template
        engine = TransformersEngine(load_model(str(path)), tokenizer, recipe.eval.batch_size)
        ids = lambda messages, tools: prompt_ids(tokenizer, messages, tools or None)  # noqa: E731
        yield Opened("transformers", engine, tokenizer, ids, time.perf_counter() - began)
    elif name == "ollama":
        with _ollama(path) as (url, model):
            yield _served("ollama", url, model, time.perf_counter() - began)
    else:
        num_ctx = recipe.data.max_length + recipe.agent.max_completion_length
        with llama_server.llama_server(path, num_ctx) as server:
            yield _served("llama.cpp", f"{server.url}/v1", path.stem, server.seconds)


def _served(name: str, url: str, model: str, seconds: float) -> Opened:
    engine = EndpointEngine(url, model, concurrency=1)

    def shown(messages, tools) -> Prompt:
        messages = to_openai(messages)
        return server_ids(url, model, messages, tools) or _count(engine, messages, tools)

    return Opened(name, engine, None, shown, seconds)


def _count(engine: EndpointEngine, messages: list[dict], tools: list[dict]) -> int | None:
    """Tokens of a prompt as the server counts them, if it does."""
    from openai import OpenAIError

    asked = {"model": engine.model, "messages": messages, "max_tokens": 1} | ({"tools": tools} if tools else {})
    try:
        usage = engine.client.chat.completions.create(**asked).usage
    except OpenAIError:  # the episode will say what is wrong
        return None
    return getattr(usage, "prompt_tokens", None)


@contextlib.contextmanager
def _ollama(folder: Path) -> Iterator[tuple[str, str]]:
    """The model in a running Ollama, under a name of its own that is gone afterwards."""
    url = as_url(os.environ.get("OLLAMA_HOST") or "127.0.0.1", "http")
    port = url.port or {"https": 443}.get(url.scheme, 11434)
    address = f"{url.scheme}://{(url.hostname or '').replace('0.0.0.0', '127.0.0.1') or '127.0.0.1'}:{port}"
    name = f"sixstep-verify-{os.getpid()}"
    made = subprocess.run(["ollama", "create", name, "-f", folder / "Modelfile"], capture_output=True, text=True)
    if made.returncode:
        raise UserError(f"ollama create fails: {made.stderr.strip()[-300:]}. Is it running? ollama serve")
    try:
        yield f"{address}/v1", name
    finally:
        subprocess.run(["ollama", "rm", name], capture_output=True)


def _play(finding: Finding, opening, rows: list[dict], make_episode: Callable, judge: Any) -> None:
    with opening as opened:  # the model is gone when this returns, before the next one is loaded
        finding.engine, finding.load_seconds = opened.name, opened.load_seconds
        episodes = [make_episode(row, opened.tokenizer) for row in rows]
        finding.prompts = [opened.ids_of(e.row["prompt"], e.tools) for e in episodes]
        for batch in opened.engine.play(episodes):
            finding.seconds += sum(e.seconds for e in batch)
            recorded = zip(batch, records_of(batch, finding.name, judge), strict=True)
            finding.records += [r | {"seconds": e.seconds} for e, r in recorded]
    order = {row["id"]: n for n, row in enumerate(rows)}
    finding.records.sort(key=lambda r: order[r["id"]])


def _problem(stage: Finding, found: Finding) -> str:
    """Why a file does not pass; empty where it does, or was not asked."""
    if found.missing or found is stage:
        return ""
    if errors := [r["error"] for r in found.records if r["error"]]:
        return f"{len(errors)} of {len(found.records)} episodes could not be played ({errors[0]})"
    what = "ids" if any(isinstance(p, list) for p in found.prompts) else "counts of tokens"
    if other := sum(not _same_prompt(*pair) for pair in zip(stage.prompts, found.prompts, strict=True)):
        return f"{other} of {len(found.records)} prompts reach it with other {what} than in training"
    same = same_episodes(stage, found)
    if same == len(found.records):
        return ""
    if not same and not _speaks(stage):
        return "no episode is the stage's, which answers nothing right and calls no tool: only equal ones could tell"
    for what, verdicts in (("accuracy", correct), ("tool use", used_tool)):
        now, own = proportion(verdicts(found)), proportion(verdicts(stage))
        if now["accuracy"] is None or own["accuracy"] is None:
            return f"{what} is unknown: no episode could be judged"
        low, high = own["interval"]
        if what == "tool use":  # servers mend a call that the model left unfinished: more of it is no drift
            high = 1.0
        if not low - 1e-9 <= now["accuracy"] <= high + 1e-9:
            return f"{what} is {share(now['accuracy'])}, the stage's {share(own['accuracy'])} ({share(low)} - {share(high)})"
    return ""


def _same_prompt(trained: list[int], shown: Prompt) -> bool:
    return shown is None or shown == (len(trained) if isinstance(shown, int) else trained)


def _speaks(stage: Finding) -> bool:
    """Whether there is something right or a tool call to be compared with."""
    return any(correct(stage)) or any(used_tool(stage))


def _unproven(stage: Finding, found: Finding) -> str:
    """Why a file that has not failed has not passed either; empty where it has, or was not asked."""
    if found.missing or found is stage or _speaks(stage):
        return ""
    same, n = same_episodes(stage, found), len(found.records)
    if same == n:
        return ""
    return (
        f"The stage answers none of {n} right and calls no tool, so only equal episodes could tell, and {same} of {n} are "
        "equal. Verify a stage that has learnt something"
    )


def correct(finding: Finding) -> list[bool | None]:
    return [r["correct"] for r in finding.records]


def used_tool(finding: Finding) -> list[bool]:
    return [r["tool_calls"] > 0 for r in finding.records]


def same_episodes(stage: Finding, found: Finding) -> int:
    """Conversations that are the same word for word: what was said, called and brought back."""
    return sum(said(a) == said(b) for a, b in zip(stage.records, found.records, strict=True))


def said(record: dict) -> list[str]:
    lines = []
    for message in record["completion"]:
        lines += [f"{message['role']}: {message['content'].strip()}"] if message["content"].strip() else []
        calls = [call["function"] for call in message.get("tool_calls") or []]
        lines += [f"{message['role']} calls {call['name']} {call['arguments']}" for call in calls]
    return lines


def first_difference(stage: Finding, found: Finding) -> str:
    for own, other in zip(stage.records, found.records, strict=True):
        if said(own) != said(other):
            parts = [f"first episode that differs: {own['question']}", "the stage:", *(f"  {x}" for x in said(own))]
            return "\n".join([*parts, f"{found.name}:", *(f"  {x}" for x in said(other) or ["(nothing)"])])
    return "no episode differs"


def table(findings: list[Finding], of: str = "") -> Table:
    header = ["export", "engine", "size", "loaded in", "same episodes", "accuracy", "tool use", "speed", "verdict"]
    rows, stage = [], findings[0]
    for f in findings:
        if f.missing:
            rows.append([f.name, "-", f"{f.size / 1e6:.0f} MB", "-", "-", "-", "-", "-", "not verified"])
            continue
        n, tokens = len(f.records), sum(r["tokens"] or 0 for r in f.records)
        verdict = "" if f is stage else "FAILED" if f.problem else "unproven" if f.unproven else "passed"
        rows.append([
            f.name, f.engine, f"{f.size / 1e6:.0f} MB", f"{f.load_seconds:.1f} s",
            "" if f is stage else f"{same_episodes(stage, f)} of {n}",
            "{correct} of {n}".format(**proportion(correct(f))), f"{sum(used_tool(f))} of {n}",
            f"{tokens / f.seconds:.0f} tok/s" if f.seconds else "-", verdict,
        ])  # fmt: skip
    return Table(of, header, rows)


def _write(folder: Path, findings: list[Finding], of: str) -> None:
    found = [table(findings, of)]
    with atomic_file(folder / "verify.md") as f:
        f.write(markdown(found))
    write_jsonl(folder / "verify.jsonl", [r for finding in findings for r in finding.records])
    show(found, "exports in their engines")


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.iterdir() if p.is_file()]
    return sum(p.stat().st_size for p in files)
