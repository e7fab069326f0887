"""Execution match: does a predicted SQL query give the result of the gold query on this database?

    from rewards.exec_match import exec_match, exec_match_batch
    exec_match("SELECT name FROM singer", "SELECT Name FROM singer", "concert.sqlite")    # Verdict(correct=True, reason=...)

    python -m rewards.exec_match --pairs pairs.jsonl --db_root data/spider/database --workers 2 --out judged.jsonl

Reads rows {"db_id", "gold", "pred", ...} and DIR/<db_id>/<db_id>.sqlite; writes each row + {"correct", "reason"}; the last line
printed is JSON: pairs, correct, undecided, seconds, pairs_per_s.

Modes: "official" gives the verdicts of the Spider test-suite evaluator, "strict" is the judge to trust (rewards/exec_compare.py says
how values, rows and columns compare). correct is None, undecided, when gold fails or the infrastructure does: a reward must
then be None, never 0. One quirk follows the official tool only with keep_distinct: an empty prediction counts as an empty result.

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
import select
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envs.sqlite_exec import QueryError, fingerprint, settled
from envs.sqlite_worker import Worker, WorkerDied, borrow
from rewards.exec_worker import Job

MODES = ("official", "strict")
CHUNK = 64  # pairs of one database that a worker gets at once
QUICK_SECONDS = 0.05
RESTART_SECONDS = 0.12  # what killing a worker and starting the next costs
VERDICTS = 100_000  # kept in this process
HASH_WHOLE = 256 << 20  # larger files are named by their first and last MiB and their stat


@dataclass(frozen=True)
class Verdict:
    correct: bool | None  # None: undecided, not the prediction's fault
    reason: str


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
    text = "\0".join((job.mode, str(job.keep_distinct), gold, pred)).encode(errors="surrogatepass")
    return job.content, hashlib.blake2b(text, digest_size=16).digest()


@dataclass
class _Chunk:
    job: Job
    pairs: dict[int, tuple[str, str]]  # place in the batch -> gold, prediction; those not judged yet
    alone: bool = False  # it holds one pair, so a death of the worker is that pair's
    given: float = 0.0
    gold_seconds: float | None = None  # known once gold has run, in a chunk that is not quick


@dataclass
class _Batch:
    timeout: float
    deadline: float  # time.monotonic() or inf
    workers: list[Worker]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    cacheable: set[int] = field(default_factory=set)
    slow: list[_Chunk] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)

    def run(self, chunks: deque[_Chunk], quick: float) -> None:
        """Hand out the chunks until all are judged. quick: seconds a query, 0 for the full limits, one pair a chunk."""
        busy: dict[int, tuple[int, _Chunk]] = {}  # descriptor -> position in self.workers, what it works on
        free = list(range(len(self.workers)))
        while chunks or busy:
            while chunks and free:
                position = free.pop()
                chunk = _take(chunks, [worker.seen for worker in self.workers], position)
                if not self._start(position, chunk, quick, len(chunks) + len(busy) + 1):
                    free.append(position)
                    continue
                busy[self.workers[position].process.stdout.fileno()] = (position, chunk)
            if not busy:
                continue
            until = min([self.deadline + 0.1 * self.timeout, *(self.workers[p].until for p, _ in busy.values())])
            ready = select.select(list(busy), [], [], min(60.0, max(0.0, until - time.monotonic())))[0]
            if not ready and time.monotonic() >= until:
                ready = list(busy)  # nothing should get here: the alarms did not ring, or the machine stood still
                for position, _ in busy.values():
                    self.workers[position].kill()
            for descriptor in ready:
                position, chunk = busy[descriptor]
                if self._hear(position, chunk, chunks, quick):
                    del busy[descriptor]
                    free.append(position)

    def _start(self, position: int, chunk: _Chunk, quick: float, waiting: int) -> bool:
        worker, left = self.workers[position], self.deadline - time.monotonic()
        if left <= 0.02:
            for index in chunk.pairs:
                self.verdicts.setdefault(
                    index, Verdict(None, "the time of the batch was used up before this pair was judged")
                )
            return False
        share = left * len(self.workers) / waiting - RESTART_SECONDS
        chunk.given = quick or max(0.05, min(self.timeout, left, share))
        chunk.gold_seconds = None
        worker.seen.add(chunk.job.content)
        arguments = (
            chunk.job,
            [(i, *pair) for i, pair in chunk.pairs.items()],
            chunk.given,
            bool(quick),
            self.deadline < float("inf"),
        )
        try:
            worker.send("rewards.exec_worker:judge", arguments, 0)
        except WorkerDied as death:
            self._bury(position, chunk, deque(), death, quick)
            return False
        self._expect(worker, chunk)
        return True

    def _expect(self, worker: Worker, chunk: _Chunk) -> None:
        worker.until = time.monotonic() + 3 * chunk.given + 2.0

    def _hear(self, position: int, chunk: _Chunk, chunks: deque[_Chunk], quick: float) -> bool:
        """Take one message; True when the worker is free again."""
        worker = self.workers[position]
        try:
            answer = worker.receive()
        except WorkerDied as death:
            self._bury(position, chunk, chunks, death, quick)
            return True
        if answer == "done":
            return True
        if isinstance(answer, Exception):
            raise answer
        self._expect(worker, chunk)
        for index, status, reason, cacheable in answer:
            if status == "gold":
                chunk.gold_seconds = reason
                continue
            pair = chunk.pairs.pop(index)
            if status == "slow":
                self.slow.append(_Chunk(chunk.job, {index: pair}, alone=True))
            elif status == "timeout":
                self.verdicts[index] = self._late(chunk)
            else:
                self.verdicts[index] = Verdict(status, reason)
                if cacheable:
                    self.cacheable.add(index)
        return False

    def _bury(self, position: int, chunk: _Chunk, chunks: deque[_Chunk], death: WorkerDied, quick: float) -> None:
        """Replace the dead worker; judge again, one by one, what it had not reported."""
        self.workers[position] = Worker()
        for index, pair in chunk.pairs.items():
            again = _Chunk(chunk.job, {index: pair}, alone=True)
            if not chunk.alone:
                chunks.appendleft(again)
            elif death.timed_out and quick:
                self.slow.append(again)
            elif death.timed_out:
                self.verdicts[index] = self._late(chunk)
            else:
                self.deaths[index] = self.deaths.get(index, 0) + 1
                if self.deaths[index] < 2:
                    chunks.appendleft(again)
                else:
                    self.verdicts[index] = Verdict(None, "the worker that judged it was killed twice")

    def _late(self, chunk: _Chunk) -> Verdict:
        if chunk.gold_seconds is None:
            return Verdict(None, f"gold fails: it ran longer than {chunk.given:.3g} s")
        if chunk.given >= 0.99 * self.timeout or chunk.given >= 10 * chunk.gold_seconds:
            return Verdict(False, f"timeout: ran longer than {chunk.given:.3g} s (gold: {chunk.gold_seconds:.3g} s)")
        return Verdict(None, f"the batch had only {chunk.given:.3g} s for it (gold: {chunk.gold_seconds:.3g} s)")


def _take(chunks: deque[_Chunk], seen: list[set[str]], position: int) -> _Chunk:
    """The next chunk for this worker: a database that it has open, else one that nobody has, else the first."""
    best = None
    for place, chunk in enumerate(chunks):
        if chunk.job.content in seen[position]:
            best = place
            break
        if best is None and not any(chunk.job.content in other for other in seen):
            best = place
    chunk = chunks[best or 0]
    del chunks[best or 0]
    return chunk


def exec_match_batch(
    preds: Sequence[str],
    golds: Sequence[str],
    db_paths: Sequence[str | Path],
    mode: str = "official",
    keep_distinct: bool = False,
    timeout: float = 10.0,
    batch_timeout: float | None = 10.0,
    workers: int | None = None,
) -> list[Verdict]:
    """Judge many predictions; the whole call takes no longer than batch_timeout (None: as long as `timeout` for each lasts)."""
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, found {mode!r}")
    if not len(preds) == len(golds) == len(db_paths):
        raise ValueError(f"one gold and one database a prediction, found {len(preds)} {len(golds)} {len(db_paths)}")
    deadline = time.monotonic() + batch_timeout if batch_timeout else float("inf")
    answers: list[Verdict | None] = [None] * len(preds)
    jobs: dict[str, Job | Verdict] = {}
    same: dict[tuple, list[int]] = {}  # verdict key -> the places that wait for it
    for place, (pred, gold, path) in enumerate(zip(preds, golds, map(str, db_paths), strict=True)):
        if path not in jobs:
            jobs[path] = _job(path, mode, keep_distinct)
        job = jobs[path]
        if isinstance(job, Verdict):
            answers[place] = job
        elif not isinstance(pred, str):
            answers[place] = Verdict(False, f"a prediction is text, not {type(pred).__name__}")
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
            work.setdefault(str(db_paths[first]), {})[first] = golds[first], preds[first]
        batch = _judge(
            [(jobs[p], pairs) for p, pairs in work.items()], timeout, deadline, workers or os.cpu_count() or 1
        )
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


def _job(path: str, mode: str, keep_distinct: bool) -> Job | Verdict:
    path = os.path.abspath(path)
    try:
        stat = fingerprint(path)
        return Job(path, content_key(path, stat), stat, mode, keep_distinct)
    except QueryError as error:
        return Verdict(None, str(error))
    except OSError as error:
        return Verdict(None, f"cannot read the database {path}: {error.strerror}")


def _judge(work: list[tuple[Job, dict]], timeout: float, deadline: float, workers: int) -> _Batch:
    count = sum(len(pairs) for _, pairs in work)
    patience = min(timeout, max(0.0, deadline - time.monotonic()))
    with borrow(max(1, min(workers, (count + 7) // 8)), patience) as lent:
        batch = _Batch(timeout, deadline, lent)
        if not lent:
            busy = Verdict(None, f"every worker of the sandbox was busy for {patience:g} s")
            batch.verdicts = {index: busy for _, pairs in work for index in pairs}
        elif count <= 2:
            batch.run(
                deque(_Chunk(job, {i: pair}, alone=True) for job, pairs in work for i, pair in pairs.items()), 0.0
            )
        else:
            size = max(1, min(CHUNK, count // (4 * len(lent))))
            chunks: deque[_Chunk] = deque()
            for job, pairs in work:
                items = list(pairs.items())
                for start in range(0, len(items), size):
                    chunks.append(_Chunk(job, dict(items[start : start + size]), alone=size == 1))
            share = 0.3 * (deadline - time.monotonic()) * len(lent) / count
            batch.run(chunks, min(QUICK_SECONDS, max(0.005, share)))
            batch.run(deque(batch.slow), 0.0)
        return batch


def exec_match(
    pred: str,
    gold: str,
    db_path: str | Path,
    mode: str = "official",
    keep_distinct: bool = False,
    timeout: float = 10.0,
) -> Verdict:
    """One pair. timeout: seconds for gold, and for the prediction. correct is None where nobody can tell."""
    return exec_match_batch([pred], [gold], [db_path], mode, keep_distinct, timeout, None, 1)[0]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rewards.exec_match", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", required=True, type=Path, help="JSONL of rows with db_id, gold, pred")
    parser.add_argument("--db_root", required=True, type=Path, help="folder with <db_id>/<db_id>.sqlite")
    parser.add_argument("--mode", choices=MODES, default="official")
    parser.add_argument("--keep_distinct", action="store_true", help="official mode: do not drop DISTINCT")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds a query")
    parser.add_argument("--out", type=Path, help="write each row with its verdict here")
    args = parser.parse_args(argv)
    rows = _read_rows(args.pairs)
    if not args.db_root.is_dir():
        sys.exit(f"--db_root {args.db_root}: no such folder; it holds <db_id>/<db_id>.sqlite")
    paths = [args.db_root / row["db_id"] / f"{row['db_id']}.sqlite" for row in rows]
    started = time.perf_counter()
    preds, golds = [row["pred"] for row in rows], [row["gold"] for row in rows]
    verdicts = exec_match_batch(preds, golds, paths, args.mode, args.keep_distinct, args.timeout, None, args.workers)
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
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
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
