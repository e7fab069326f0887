"""Hands the pairs of one batch to worker processes: the scheduler behind rewards/exec_match.py.

First all pairs in chunks of one database under a very short limit, then alone what was slow. A worker that dies (its alarm, or a
kill from outside) is replaced; the pair that it was at is run again apart from the others.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from envs.sqlite_worker import Worker, WorkerDied, borrow, readable
from rewards.exec_worker import Job

CHUNK = 64  # pairs of one database that a worker gets at once
TRIES = 3
QUICK_SECONDS = 0.05
RESTART_SECONDS = 0.15  # what killing a worker and starting the next costs


@dataclass(frozen=True)
class Verdict:
    correct: bool | None  # None: undecided, not the prediction's fault
    reason: str


@dataclass
class Chunk:
    job: Job
    pairs: dict[int, tuple[str, str]]  # place in the batch -> gold, prediction; those not judged yet
    killed: bool = False  # its one pair was at work when a worker died
    given: float = 0.0
    gold_seconds: float | None = None  # known once gold has run, in a chunk that is not quick


@dataclass
class Batch:
    timeout: float
    deadline: float  # time.monotonic() or inf
    workers: list[Worker]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    cacheable: set[int] = field(default_factory=set)
    slow: list[Chunk] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)
    silent: int = 0  # deaths from outside since the last answer

    def run(self, chunks: deque[Chunk], quick: float) -> None:
        """Hand out the chunks until all are judged. quick: seconds a query, 0 for the full limits, one pair a chunk."""
        busy: dict[int, tuple[int, Chunk]] = {}  # descriptor -> position in self.workers, what it works on
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
            ready = readable(busy, min(60.0, until - time.monotonic()))
            if not ready and time.monotonic() >= until:
                ready = list(busy)  # nothing should get here: the alarms did not ring, or the machine stood still
                for position, _ in busy.values():
                    self.workers[position].kill()
            for descriptor in ready:
                position, chunk = busy[descriptor]
                if self._hear(position, chunk, chunks, quick):
                    del busy[descriptor]
                    free.append(position)

    def _start(self, position: int, chunk: Chunk, quick: float, waiting: int) -> bool:
        worker, left = self.workers[position], self.deadline - time.monotonic()
        if left <= 0.02:
            for index in chunk.pairs:
                self.verdicts.setdefault(
                    index, Verdict(None, "the time of the batch was used up before this pair was judged")
                )
            return False
        share = left * len(self.workers) / waiting - RESTART_SECONDS * chunk.killed
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

    def _expect(self, worker: Worker, chunk: Chunk) -> None:
        worker.until = time.monotonic() + 3 * chunk.given + 2.0

    def _hear(self, position: int, chunk: Chunk, chunks: deque[Chunk], quick: float) -> bool:
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
        self.silent = 0
        for index, status, reason, cacheable in answer:
            if status == "gold":
                chunk.gold_seconds = reason
                continue
            pair = chunk.pairs.pop(index)
            if status == "slow":
                self.slow.append(Chunk(chunk.job, {index: pair}))
            elif status == "timeout":
                self.verdicts[index] = self._late(chunk)
            else:
                self.verdicts[index] = Verdict(status, reason)
                if cacheable:
                    self.cacheable.add(index)
        return False

    def _bury(self, position: int, chunk: Chunk, chunks: deque[Chunk], death: WorkerDied, quick: float) -> None:
        """Replace the dead worker. What it was at bears the blame; what it had finished but not reported runs again."""
        culprit = self.workers[position].marked()
        self.workers[position] = Worker()
        if not death.timed_out:
            self.silent += 1
            if self.silent > 50:
                raise RuntimeError(
                    "50 workers of the SQL sandbox died without an answer (killed from outside? out of memory?)"
                )
        if culprit not in chunk.pairs:
            culprit = next(iter(chunk.pairs), None)
        rest = {index: pair for index, pair in chunk.pairs.items() if index != culprit}
        if rest:
            chunks.appendleft(Chunk(chunk.job, rest))
        if culprit is None:
            return
        again = Chunk(chunk.job, {culprit: chunk.pairs[culprit]}, killed=True)
        if death.timed_out and quick:
            self.slow.append(again)
        elif death.timed_out:
            self.verdicts[culprit] = self._late(chunk)
        else:
            self.deaths[culprit] = self.deaths.get(culprit, 0) + 1
            if self.deaths[culprit] < TRIES:
                chunks.appendleft(again)
            else:
                self.verdicts[culprit] = Verdict(None, f"{TRIES} workers were killed while they judged it")

    def _late(self, chunk: Chunk) -> Verdict:
        if chunk.gold_seconds is None:
            return Verdict(None, f"gold fails: it ran longer than {chunk.given:.3g} s")
        if chunk.given >= 0.99 * self.timeout or chunk.given >= 10 * chunk.gold_seconds:
            return Verdict(False, f"timeout: ran longer than {chunk.given:.3g} s (gold: {chunk.gold_seconds:.3g} s)")
        return Verdict(None, f"the batch had only {chunk.given:.3g} s for it (gold: {chunk.gold_seconds:.3g} s)")


def _take(chunks: deque[Chunk], seen: list[set[str]], position: int) -> Chunk:
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


def _quick(deadline: float, workers: int, pairs: int) -> float:
    """Seconds a query in a pass that may take a third of the time left, whatever the pairs are."""
    return min(QUICK_SECONDS, max(0.005, 0.3 * (deadline - time.monotonic()) * workers / max(1, pairs)))


def judge_pairs(work: list[tuple[Job, dict]], timeout: float, deadline: float, workers: int) -> Batch:
    count = sum(len(pairs) for _, pairs in work)
    patience = min(timeout, max(0.0, deadline - time.monotonic()))
    with borrow(max(1, min(workers, (count + 7) // 8)), patience) as lent:
        batch = Batch(timeout, deadline, lent)
        if not lent:
            busy = Verdict(None, f"every worker of the sandbox was busy for {patience:g} s")
            batch.verdicts = {index: busy for _, pairs in work for index in pairs}
        elif count <= 2:
            batch.run(deque(Chunk(job, {i: pair}) for job, pairs in work for i, pair in pairs.items()), 0.0)
        else:
            size = max(1, min(CHUNK, count // (4 * len(lent))))
            chunks: deque[Chunk] = deque()
            for job, pairs in work:
                items = list(pairs.items())
                for start in range(0, len(items), size):
                    chunks.append(Chunk(job, dict(items[start : start + size])))
            first = _quick(deadline, len(lent), count)
            batch.run(chunks, first)
            if first < QUICK_SECONDS:  # what is only a little slow is judged before time is given to what may hang
                again, batch.slow = deque(c for c in batch.slow if not c.killed), [c for c in batch.slow if c.killed]
                batch.run(again, _quick(deadline, len(lent), len(again)))
            batch.run(deque(sorted(batch.slow, key=lambda chunk: chunk.killed)), 0.0)
        return batch
