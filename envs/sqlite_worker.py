"""Worker processes that can be killed: what runs SQL for envs/sqlite_exec.py and rewards/exec_match.py.

A worker is a fresh `python envs/sqlite_worker.py` (not a fork: the trainer holds CUDA and threads), reads pickled requests
("module:function", arguments, seconds) from its standard input and answers on its standard output. Before each request the
worker arms the kernel's alarm clock, whose default action ends the process even inside one long call of SQLite; the caller
then sees WorkerDied(timed_out=True) and the next call starts a new worker. A worker ends by itself when its parent is gone.

Not covered: a worker runs as the same user, in the same network and file system, with the limits set in `_lock_down`.
"""

import importlib
import math
import mmap
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_WORKERS = max(4, (os.cpu_count() or 1) + 2)
MOST_WORKERS = 8 * MAX_WORKERS  # with those that sit on slow requests
SLOW = 0.5  # seconds after which a request is one: another worker may start beside it
GRACE = 1.03  # the alarm rings at timeout * GRACE + 0.02 s; the proper message comes at timeout
HEADER = struct.Struct("<I")
MARK = struct.Struct("<q")


class WorkerDied(Exception):
    """timed_out: by its own alarm; else it was killed from outside or crashed."""

    def __init__(self, timed_out: bool, code: int | None):
        super().__init__(f"the worker ended with code {code}")
        self.timed_out = timed_out


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those of the descriptors that can be read, or are closed; waits so long for the first (select() ends at 1024)."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in waiting.poll(max(0, math.ceil(seconds * 1000)))]


class Worker:
    """One child process, used by one thread at a time."""

    def __init__(self) -> None:
        shared = _shared_file()
        os.ftruncate(shared, MARK.size)
        self.progress = mmap.mmap(shared, MARK.size)
        self.process = subprocess.Popen(
            [sys.executable, "-S", __file__, str(shared)],  # -S: needs nothing but the standard library, so it starts at once
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, bufsize=0, pass_fds=(shared,),
        )  # fmt: skip
        os.close(shared)
        self.seen: set[str] = set()  # databases it has open, for whoever hands out work
        self.until = float("inf")  # when the caller gives up on it, whatever the alarm did

    def send(self, function: str, arguments: tuple, timeout: float) -> None:
        """timeout: seconds for the whole request; a request that sets its own alarms passes 0."""
        payload = pickle.dumps((function, arguments, timeout))
        try:
            _write(self.process.stdin.fileno(), HEADER.pack(len(payload)) + payload)
        except OSError:
            raise self.dead() from None
        self.until = time.monotonic() + timeout * 1.2 + 1.0 if timeout else float("inf")

    def receive(self) -> Any:
        try:
            descriptor = self.process.stdout.fileno()
            while self.until < float("inf"):
                if readable([descriptor], self.until - time.monotonic()):
                    break
                if time.monotonic() >= self.until:
                    self.kill()
                    raise WorkerDied(True, None)
            (size,) = HEADER.unpack(_read(descriptor, HEADER.size))
            return pickle.loads(_read(descriptor, size))
        except (OSError, EOFError, ValueError):  # ValueError: killed by us, its pipes are closed
            raise self.dead() from None

    def call(self, function: str, arguments: tuple, timeout: float) -> Any:
        self.send(function, arguments, timeout)
        return self.receive()

    def marked(self) -> int:
        """What the worker was at when it died; -1 for nothing in particular."""
        return MARK.unpack(self.progress[:])[0]

    def dead(self) -> WorkerDied:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        return WorkerDied(code in (-signal.SIGALRM, -signal.SIGPROF), code)

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _shared_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux: memory only
        return os.memfd_create("progress")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


_idle: list[Worker] = []
_loans: list[float] = []  # since when, one for each worker that is lent
_changed = threading.Condition()


def _after_fork() -> None:
    """A forked child (a data loader) must not talk to its parent's workers: it starts its own."""
    global _idle, _loans, _changed
    _idle, _loans, _changed = [], [], threading.Condition()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def borrow(count: int, patience: float) -> Iterator[list[Worker]]:
    """Between one and `count` workers for this thread, none if all are busy for `patience` seconds."""
    until = time.monotonic() + patience
    with _changed:
        while (room := _room()) <= 0 and time.monotonic() < until:
            _changed.wait(min(SLOW / 5, max(0.0, until - time.monotonic())))  # nobody tells when a request becomes slow
        count = max(0, min(count, room))
        since = time.monotonic()
        _loans.extend([since] * count)
        workers = [_idle.pop() if _idle else None for _ in range(count)]
    try:
        workers = [worker if worker is not None and worker.alive() else Worker() for worker in workers]
        yield workers
    except BaseException:
        for worker in workers:  # it may be in the middle of an answer that nobody will read
            if worker is not None:
                worker.kill()
        raise
    finally:
        with _changed:
            for _ in range(count):
                _loans.remove(since)
            alive = [worker for worker in workers if worker is not None and worker.alive()]
            room = max(0, MAX_WORKERS - len(_idle))
            _idle.extend(alive[:room])
            _changed.notify(count)
        for worker in alive[room:]:
            worker.kill()


def _room() -> int:
    """How many workers may be lent now: slow queries must not hold up quick ones."""
    now = time.monotonic()
    slow = sum(now - since > SLOW for since in _loans)
    return min(MAX_WORKERS + slow, MOST_WORKERS) - len(_loans)


def stop_workers() -> None:
    """End the idle workers (tests and benchmarks that want a cold start)."""
    with _changed:
        idle, _idle[:] = list(_idle), []
    for worker in idle:
        worker.kill()


# ---- the child ----


def alarm(seconds: float, processor: float = 0) -> None:
    """End this process by the kernel's hand a little more than `seconds` from now, or after so much processor time, which is
    fairer to short limits on a busy machine; 0 takes it back."""
    signal.setitimer(signal.ITIMER_REAL, seconds * GRACE + 0.02 if seconds else 0)
    signal.setitimer(signal.ITIMER_PROF, processor)


def mark(item: int) -> None:
    """Leave in shared memory what is being worked on: it outlives this process."""
    _progress[:] = MARK.pack(item)


def emit(answer: Any) -> None:
    """Send one answer; a function that streams several calls it itself."""
    payload = pickle.dumps(answer)
    _write(_answers, HEADER.pack(len(payload)) + payload)


_answers = 1
_progress: Any = bytearray(MARK.size)


def _lock_down() -> None:
    import resource

    from envs.sqlite_exec import HEAP_BYTES

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (4 * HEAP_BYTES, 4 * HEAP_BYTES))
    except (ValueError, OSError):  # macOS refuses it: SQLite's own heap limit remains
        pass
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; the closed pipe ends this process


def _serve() -> None:
    global _answers, _progress
    _progress = mmap.mmap(int(sys.argv[1]), MARK.size)
    sys.path[0] = str(ROOT)
    for package in (
        "envs",
        "rewards",
    ):  # bare packages: their __init__ imports what needs more than the standard library
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(ROOT / package)]
    sys.modules["envs.sqlite_worker"] = sys.modules["__main__"]  # one copy of emit() for the functions called
    requests, _answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _lock_down()
    functions = {}
    while True:
        try:
            (size,) = HEADER.unpack(_read(requests, HEADER.size))
            name, arguments, timeout = pickle.loads(_read(requests, size))
        except EOFError:
            return
        if name not in functions:
            module, function = name.split(":")
            functions[name] = getattr(importlib.import_module(module), function)
        mark(-1)
        alarm(timeout)
        try:
            answer = functions[name](*arguments)
        except Exception as error:  # sent to the caller, who raises it
            answer = error
        alarm(0)
        try:
            emit(answer)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    _serve()
