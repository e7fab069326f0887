"""Execution match: does a predicted SQL query give the result of the gold query on this database?

    from rewards.exec_match import exec_match, exec_match_batch
    exec_match("SELECT name FROM singer", "SELECT Name FROM singer", "concert.sqlite")    # Verdict(correct=True, reason=...)

    python -m rewards.exec_match --pairs pairs.jsonl --db_root data/spider/database --workers 2 --out judged.jsonl

Reads rows {"db_id", "gold", "pred", ...} and DIR/<db_id>/<db_id>.sqlite; writes each row + {"correct", "reason"}; the last line
printed is JSON: pairs, correct, undecided, seconds, pairs_per_s.

Modes: "official" gives the verdicts of the Spider test-suite evaluator, "strict" is the judge to trust (rewards/exec_compare.py says
how values, rows and columns compare). correct is None, undecided, when gold fails or the infrastructure does: a reward must
then be None, never 0. One quirk follows the official tool only with keep_distinct: an empty prediction counts as an empty result.
Gold that reads no table is an answer without its query (tasks/own_db.py), of which the official tool knows nothing: DISTINCT is kept,
and a number equals the text that SQLite writes for it, because nobody knows the type of the column. Only a prediction that reads a
table gains by that.

How it is fast: queries run in worker processes with open connections (envs/sqlite_exec.py), gold runs once per database content and
worker, a prediction is stopped at one row more than gold has, a verdict known for (database content, gold, prediction) is not
computed again. How it never stalls: pairs first run under a very short limit; what is slow is run again alone, and killed
at its limit. In a batch with `batch_timeout` the slow ones share what is left of that time: a prediction that was given its full
limit, or ten times what gold took, is wrong; one that was given less is undecided.
"""

import argparse
import hashlib
import json
import os
import sqlite3
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.sqlite_exec import QueryError, fingerprint, settled
from rewards.exec_batch import Verdict, judge_pairs
from rewards.exec_worker import Job

MODES = ("official", "strict")
VERDICTS = 100_000  # kept in this process
HASH_WHOLE = 256 << 20  # larger files are named by their first and last MiB and their stat


_verdicts: OrderedDict[tuple, Verdict] = OrderedDict()
_contents: dict[str, tuple[tuple, str]] = {}
_lock = threading.Lock()


def forget() -> None:
    """Empty the caches of this process (benchmarks of a cold start)."""
    with _lock:
        _verdicts.clear()
        _contents.clear()


def content_key(db_path: str, stat: tuple) -> str:
    """Names the content of the file. Computed again when the stat fingerprint differs."""
    known = _contents.get(db_path)
    if known is not None and known[0] == stat:
        return known[1]
    digest = hashlib.sha256()
    with open(db_path, "rb") as file:
        if stat[2] <= HASH_WHOLE:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            digest.update(repr(stat).encode() + file.read(1 << 20))
            file.seek(-(1 << 20), os.SEEK_END)
            digest.update(file.read())
    key = digest.hexdigest()
    if settled(stat):
        _contents[db_path] = (stat, key)
    return key


def _verdict_key(job: Job, gold: str, pred: str) -> tuple:
    text = "\0".join((job.mode, f"{job.keep_distinct} {bool(job.twin)}", gold, pred)).encode(errors="surrogatepass")
    return job.content, hashlib.blake2b(text, digest_size=16).digest()


def exec_match_batch(
    preds: Sequence[str],
    golds: Sequence[str],
    db_paths: Sequence[str | Path],
    mode: str = "official",
    keep_distinct: bool = False,
    timeout: float = 10.0,
    batch_timeout: float | None = 10.0,
    workers: int | None = None,
    neighbours: int | Mapping[str, Sequence[str | Path]] = 0,
) -> list[Verdict]:
    """Judge many predictions; the whole call takes no longer than batch_timeout (None: as long as `timeout` for each lasts).

    neighbours: a correct prediction must also match gold on this many mutated copies of its database (rewards/neighbours.py); or
    the copies themselves, {db_path: paths}, made beforehand with the golds of the whole data set, which catches more.
    """
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, found {mode!r}")
    if not len(preds) == len(golds) == len(db_paths):
        raise ValueError(f"one gold and one database a prediction, found {len(preds)} {len(golds)} {len(db_paths)}")
    db_paths = [str(path) for path in db_paths]
    copies = _copies(db_paths, neighbours) if isinstance(neighbours, int) else neighbours
    deadline = time.monotonic() + batch_timeout if batch_timeout else float("inf")
    limits = timeout, deadline, workers or os.cpu_count() or 1
    verdicts = _judge_all(preds, golds, db_paths, (mode, keep_distinct, False), limits)
    return _harden(verdicts, preds, golds, db_paths, copies, (mode, keep_distinct), limits) if copies else verdicts


def _copies(db_paths: list[str], k: int) -> dict[str, list[Path]]:
    """A database of which no copy can be made has none here: what it is judged on alone is undecided, then."""
    from rewards.neighbours import make_neighbours

    copies: dict[str, list[Path]] = {}
    for path in sorted(set(db_paths)) if k else ():
        try:
            copies[path] = make_neighbours(path, k)
        except (QueryError, OSError, OverflowError, sqlite3.Error):
            copies[path] = []
    return copies


def _harden(
    verdicts: list, preds: Sequence, golds: Sequence, db_paths: list[str], copies: Mapping, how: tuple, limits: tuple
) -> list:
    """A gold whose result on a copy hangs on the order of the rows (ties at a LIMIT) says nothing there: it differs on the twin."""
    checks = []
    for i, verdict in enumerate(verdicts):
        if verdict.correct and not copies.get(db_paths[i]):
            verdicts[i] = Verdict(None, f"right on {db_paths[i]}, of which there are no neighbours")
        elif verdict.correct:
            checks += [
                (i, str(copy)) for copy in copies[db_paths[i]] if twin_of(copy) or "limit" not in golds[i].lower()
            ]
    twins = [check for check in checks if twin_of(check[1])]
    texts = [golds[i] for i, _ in twins]
    same = _judge_all(texts, texts, [copy for _, copy in twins], (*how, True), limits)
    unsteady = {check for check, verdict in zip(twins, same, strict=True) if not verdict.correct}
    checks = [check for check in checks if check not in unsteady]
    wanted = [golds[i] for i, _ in checks]
    found = _judge_all([preds[i] for i, _ in checks], wanted, [copy for _, copy in checks], (*how, False), limits)
    for (i, copy), verdict in zip(checks, found, strict=True):
        if verdict.correct is False:
            verdicts[i] = Verdict(False, f"right on this database by accident; on {Path(copy).name}: {verdict.reason}")
    return verdicts


def twin_of(copy: str | Path) -> str:
    """The same data with the rows in reverse order, which make_neighbours puts beside each copy where it can; else ""."""
    twin = os.path.splitext(os.path.abspath(copy))[0] + ".twin.sqlite"
    return twin if os.path.exists(twin) else ""


def _judge_all(
    preds: Sequence, golds: Sequence, db_paths: list[str], how: tuple[str, bool, bool], limits: tuple
) -> list[Verdict]:
    answers: list[Verdict | None] = [None] * len(preds)
    jobs: dict[str, Job | Verdict] = {}
    same: dict[tuple, list[int]] = {}  # verdict key -> the places that wait for it
    for place, (pred, gold, path) in enumerate(zip(preds, golds, db_paths, strict=True)):
        if path not in jobs:
            jobs[path] = _job(path, *how)
        job = jobs[path]
        if isinstance(job, Verdict):
            answers[place] = job
        elif not isinstance(pred, str):
            answers[place] = Verdict(False, f"a prediction is text, not {type(pred).__name__}")
        elif not isinstance(gold, str):
            answers[place] = Verdict(None, f"gold is text, not {type(gold).__name__}")
        else:
            key = _verdict_key(job, gold, pred)
            known = _verdicts.get(key)
            if known is None:
                same.setdefault((job.db_path, *key), []).append(place)
            else:
                answers[place] = known
    if same:
        work: dict[str, dict[int, tuple[str, str]]] = {}
        for first, *_ in same.values():
            work.setdefault(db_paths[first], {})[first] = golds[first], preds[first]
        batch = judge_pairs([(jobs[path], pairs) for path, pairs in work.items()], *limits)
        for (_, *key), places in same.items():
            verdict = batch.verdicts[places[0]]
            for place in places:
                answers[place] = verdict
            if places[0] in batch.cacheable:
                with _lock:
                    _verdicts[tuple(key)] = verdict
                    while len(_verdicts) > VERDICTS:
                        _verdicts.popitem(last=False)
    return answers


def _job(path: str, mode: str, keep_distinct: bool, on_twin: bool) -> Job | Verdict:
    path = os.path.abspath(path)
    try:
        stat = fingerprint(path)
        return Job(path, content_key(path, stat), stat, mode, keep_distinct, twin_of(path) if on_twin else "")
    except QueryError as error:
        return Verdict(None, str(error))
    except OSError as error:
        return Verdict(None, f"cannot read the database {path}: {error.strerror}")


def exec_match(
    pred: str,
    gold: str,
    db_path: str | Path,
    mode: str = "official",
    keep_distinct: bool = False,
    timeout: float = 10.0,
    neighbours: int | Mapping[str, Sequence[str | Path]] = 0,
) -> Verdict:
    """One pair. timeout: seconds for gold, and for the prediction. correct is None where nobody can tell."""
    return exec_match_batch([pred], [gold], [db_path], mode, keep_distinct, timeout, None, 1, neighbours)[0]


def neighbours_of(db_paths: Sequence[str | Path], golds: Sequence[str], k: int) -> dict[str, list[Path]]:
    """k copies of each database, made with the constants of all its golds: what exec_match_batch takes as `neighbours`."""
    from rewards.neighbours import make_neighbours

    asked: dict[str, set[str]] = {}
    for path, gold in zip(db_paths, golds, strict=True):
        asked.setdefault(str(path), set()).add(gold)
    return {path: make_neighbours(path, k, golds=sorted(found)) for path, found in asked.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rewards.exec_match", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", required=True, type=Path, help="JSONL of rows with db_id, gold, pred")
    parser.add_argument("--db_root", required=True, type=Path, help="folder with <db_id>/<db_id>.sqlite")
    parser.add_argument("--mode", choices=MODES, default="official")
    parser.add_argument("--keep_distinct", action="store_true", help="official mode: do not drop DISTINCT")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds a query")
    parser.add_argument("--neighbours", type=int, default=0, metavar="K", help="must match on K mutated copies as well")
    parser.add_argument("--out", type=Path, help="write each row with its verdict here")
    args = parser.parse_args(argv)
    rows = _read_rows(args.pairs)
    if not args.db_root.is_dir():
        sys.exit(f"--db_root {args.db_root}: no such folder; it holds <db_id>/<db_id>.sqlite")
    paths = [args.db_root / row["db_id"] / f"{row['db_id']}.sqlite" for row in rows]
    started = time.perf_counter()
    preds, golds = [row["pred"] for row in rows], [row["gold"] for row in rows]
    if args.neighbours:
        copies = neighbours_of(paths, golds, args.neighbours)
        started = time.perf_counter()
    verdicts = exec_match_batch(
        preds,
        golds,
        paths,
        args.mode,
        args.keep_distinct,
        args.timeout,
        None,
        args.workers,
        copies if args.neighbours else 0,
    )
    seconds = time.perf_counter() - started
    if args.out:
        lines = [
            json.dumps({**row, "correct": verdict.correct, "reason": verdict.reason}, ensure_ascii=False)
            for row, verdict in zip(rows, verdicts, strict=True)
        ]
        temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
        temporary.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogatepass")
        os.replace(temporary, args.out)
    undecided = [verdict.reason for verdict in verdicts if verdict.correct is None]
    for reason in sorted(set(undecided))[:5]:
        print(f"undecided: {reason}")
    summary = {
        "pairs": len(rows),
        "correct": sum(verdict.correct is True for verdict in verdicts),
        "undecided": len(undecided),
        "seconds": round(seconds, 3),
        "pairs_per_s": round(len(rows) / seconds, 1) if rows else 0.0,
    }
    print(json.dumps(summary))


def _read_rows(path: Path) -> list[dict]:
    if not path.is_file():
        sys.exit(f"--pairs {path}: no such file; it is JSONL, one row {{db_id, gold, pred}} a line")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            sys.exit(f"{path}:{number}: not JSON ({error})")
        missing = [key for key in ("db_id", "gold", "pred") if not isinstance(row, dict) or key not in row]
        if missing:
            sys.exit(f"{path}:{number}: no {', '.join(missing)} in this row; needed: db_id, gold, pred")
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
