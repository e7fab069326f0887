"""The sandbox's worker processes: used from threads and processes, killed, waited for; made more of only for slow queries."""

import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs import sqlite_worker
from envs.sqlite_exec import QueryError, run_query
from tests.test_sqlite_exec import FOREVER, SLOW, db, kind_of, make_database  # noqa: F401  db: a fixture


def test_many_threads(tmp_path):
    paths = [make_database(tmp_path / f"{n}.sqlite") for n in range(3)]

    def work(seed: int) -> int:
        rng = random.Random(seed)
        for _ in range(30):
            number = rng.randrange(1000)
            assert run_query(rng.choice(paths), f"SELECT {number}, count(*) FROM person").rows == [(number, 3)]
        return seed

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(work, range(12))) == list(range(12))


def test_a_hanging_thread_does_not_hold_the_others(db):
    slow = threading.Thread(target=lambda: kind_of(db, SLOW["loop of VM steps"], timeout=1.2))
    slow.start()
    time.sleep(0.2)
    started = time.monotonic()
    for _ in range(20):
        run_query(db, "SELECT 1")
    assert slow.is_alive() and time.monotonic() - started < 0.8
    slow.join()


def _in_a_process(db: str, queue) -> None:
    queue.put(run_query(db, "SELECT count(*) FROM person").rows)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_worker_processes(db, method):
    run_query(db, "SELECT 1")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    processes = [context.Process(target=_in_a_process, args=(db, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=30) for _ in processes] == [[(3,)]] * 3
    for process in processes:
        process.join()
    assert run_query(db, "SELECT count(*) FROM person").rows == [(3,)]


def test_a_worker_killed_from_outside_is_replaced(db):
    run_query(db, "SELECT 1")
    for worker in list(sqlite_worker._idle):
        os.kill(worker.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)  # on a busy machine death takes a moment
    assert run_query(db, "SELECT 1").rows == [(1,)]
    results = []
    thread = threading.Thread(
        target=lambda: results.append(run_query(db, FOREVER + "SELECT i FROM r LIMIT 1 OFFSET 3000000", timeout=60))
    )
    idle = list(sqlite_worker._idle)
    thread.start()
    time.sleep(0.15)
    busy = [worker for worker in idle if worker not in sqlite_worker._idle]
    os.kill(busy[0].process.pid, signal.SIGKILL)  # in the middle of the query; the next attempt takes another worker
    thread.join()
    assert results[0].rows == [(3_000_001,)]


def test_a_worker_ends_with_its_parent():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        worker = sqlite_worker.Worker()
        os.write(writer, str(worker.process.pid).encode())
        os._exit(0)  # as kill -9 would: nothing is cleaned up
    os.waitpid(child, 0)
    pid = int(os.read(reader, 20))
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")


def test_only_slow_queries_make_room_for_more_workers(monkeypatch):
    most, now, slow = sqlite_worker.MAX_WORKERS, time.monotonic(), time.monotonic() - 2 * sqlite_worker.SLOW
    for loans, room in (
        ([now] * most, 0),
        ([slow] * most, most),
        ([slow] + [now] * (most - 1), 1),
        ([slow] * 8 * most, 0),
    ):
        monkeypatch.setattr(sqlite_worker, "_loans", loans)
        assert sqlite_worker._room() == room


@pytest.mark.slow
def test_endless_queries_in_all_workers_hold_up_no_quick_one(db, monkeypatch):
    monkeypatch.setattr(sqlite_worker, "MAX_WORKERS", 2)
    endless = FOREVER + "SELECT count(*) FROM r"
    count = 2 * sqlite_worker.MAX_WORKERS
    with ThreadPoolExecutor(count + 4) as pool:
        slow = [pool.submit(run_query, db, endless, timeout=6.0) for _ in range(count)]
        time.sleep(0.2)
        quick = [pool.submit(run_query, db, "SELECT 1", timeout=5.0) for _ in range(4)]
        assert [f.result().rows for f in quick] == [[(1,)]] * 4
        assert not any(f.done() for f in slow)
        assert all(isinstance(f.exception(), QueryError) and f.exception().kind == "timeout" for f in slow)
    assert len(sqlite_worker._idle) <= sqlite_worker.MAX_WORKERS and not sqlite_worker._loans


def test_a_worker_that_was_killed_is_dead_to_whoever_listens():
    worker = sqlite_worker.Worker()
    worker.kill()
    with pytest.raises(sqlite_worker.WorkerDied):
        worker.receive()
