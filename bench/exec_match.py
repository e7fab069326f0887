"""Speed and agreement of the execution judge, on real prediction pairs, beside a plain implementation of the standard method.

    python bench/exec_match.py --pairs exec_match_verdicts.jsonl --db_root spider/database
    python bench/exec_match.py --pairs ... --db_root ... --keep_distinct          # the reference then needs no SQL parser
    python bench/exec_match.py --pairs ... --db_root ... --neighbours 5           # hardened match (minutes)

Reads JSONL rows {"db_id", "gold", "pred"}, where there is a known verdict also "official" and "official_keep_distinct" (1, 0 or
"error:..." where the official tool crashed: wrong). Everything is measured in one run, on the same pairs, and printed as ratios:

reference   for each pair, in one process: drop DISTINCT with sqlparse, open the database, run gold, run the prediction, compare
            rows under the permutations of columns that a sample of 20 rows leaves. What the official tool does, less its asyncio.
cold        no worker, no open connection, nothing cached in this process (the file system's cache is warm, as for the reference).
gold known  the workers have run these golds and have the databases open; every prediction is executed or compared anew.
warm        the same pairs once more: gold and predictions known, as for repeated samples of a group.
hostile     512 completions, one in ten built to hang, under one time limit for the whole batch.
"""

import argparse
import json
import random
import re
import sqlite3
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HOSTILE = [
    "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r",
    "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT i FROM r ORDER BY i * 7919 % 100003",
    ("SELECT count(*) FROM sqlite_master a, sqlite_master b, sqlite_master c, sqlite_master d, sqlite_master e, sqlite_master f,"
    " sqlite_master g, sqlite_master h"),
    "SELECT hex(zeroblob(4000000)) LIKE '%' || hex(zeroblob(2400)) || '1'",
    "SELECT instr(hex(zeroblob(4000000)), hex(zeroblob(2000000)) || '1')",
    "SELECT length(printf('%.*c', 900000000, 'x'))",
    "SELECT sum(length(randomblob(9000000))) FROM sqlite_master a, sqlite_master b, sqlite_master c, sqlite_master d",
    "WITH a(x) AS (SELECT 1)" + "".join(f", a{i}(x) AS (SELECT p.x FROM {n} p, {n} q)" for i, n in enumerate(["a"] + [f"a{j}" for j in range(28)])) + " SELECT * FROM a28",
]  # fmt: skip


# ---- the reference: written from the description of the official evaluator ----


def reference(pred: str, gold: str, path: str, keep_distinct: bool) -> bool:
    if not keep_distinct:
        if not pred:
            return False
        pred, gold = _drop_distinct(pred), _drop_distinct(gold)
    gold_rows, pred_rows = _run(path, gold), _run(path, pred)
    return pred_rows is not None and _same(gold_rows, pred_rows, "order by" in gold.lower())


def _drop_distinct(sql: str) -> str:
    import sqlparse

    return "".join(t.value for t in sqlparse.parse(sql)[0].flatten() if t.value.lower() != "distinct")


def _run(path: str, sql: str) -> list[tuple] | None:
    sql = re.sub(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", "2020", sql, flags=re.IGNORECASE)
    for found, wanted in (("> =", ">="), ("< =", "<="), ("! =", "!=")):
        sql = sql.replace(found, wanted)
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.text_factory = lambda raw: raw.decode(errors="ignore")
    try:
        return connection.execute(sql).fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        connection.close()


def _same(gold: list[tuple], pred: list[tuple], ordered: bool) -> bool:
    if not gold and not pred:
        return True
    if len(gold) != len(pred) or len(gold[0]) != len(pred[0]):
        return False
    left, right = ([tuple(sorted(row, key=lambda v: str(v) + str(type(v)))) for row in rows] for rows in (gold, pred))
    if left != right if ordered else set(left) != set(right):
        return False
    width = len(gold[0])
    choices = [set(range(width)) for _ in range(width)]
    if width > 3:
        columns = [set(column) for column in zip(*gold, strict=True)]
        for row in random.choices(pred, k=20):
            for index, values in enumerate(columns):
                choices[index] -= {other for other in choices[index] if row[other] not in values}
    for order in product(*choices):
        if len(set(order)) != width:
            continue
        moved = [tuple(row[index] for index in order) for row in pred]
        if gold == moved if ordered else set(gold) == set(moved) and Counter(gold) == Counter(moved):
            return True
    return False


# ---- measurements ----


def timed(name: str, count: int, function, base: float | None = None):
    started = time.perf_counter()
    value = function()
    seconds = time.perf_counter() - started
    ratio = f"{base / seconds:8.1f}x" if base else "     1.0x"
    print(f"{name:<34}{seconds:9.2f} s {count / seconds:10.0f} pairs/s {ratio}", flush=True)
    return value, seconds


def hostile_batch(rows: list[dict], paths: list[str], timeout: float, workers: int) -> None:
    from rewards.exec_match import exec_match_batch, forget

    rng = random.Random(0)
    picks = [rng.randrange(len(rows)) for _ in range(512)]
    bad = [rng.random() < 0.1 for _ in picks]
    preds = [
        rng.choice(HOSTILE) + f" -- {n}" if b else rows[i]["pred"]
        for n, (i, b) in enumerate(zip(picks, bad, strict=True))
    ]
    forget()
    started = time.perf_counter()
    verdicts = exec_match_batch(
        preds,
        [rows[i]["gold"] for i in picks],
        [paths[i] for i in picks],
        timeout=timeout,
        batch_timeout=timeout,
        workers=workers,
    )
    seconds = time.perf_counter() - started
    normal = [v for v, b in zip(verdicts, bad, strict=True) if not b]
    evil = Counter(str(v.correct) for v, b in zip(verdicts, bad, strict=True) if b)
    print(
        f"hostile: 512 completions, {sum(bad)} of them built to hang, limit {timeout:g} s: {seconds:.2f} s; normal ones "
        f"undecided: {sum(v.correct is None for v in normal)}; verdicts of the hostile: {dict(evil)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=Path("data/raw/spider/exec_match_verdicts.jsonl"))
    parser.add_argument("--db_root", type=Path, default=Path("data/raw/spider/database"))
    parser.add_argument("--keep_distinct", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, help="only the first pairs")
    parser.add_argument("--timeout", type=float, default=10.0, help="of the hostile batch, seconds")
    parser.add_argument(
        "--neighbours", type=int, default=0, metavar="K", help="measure the hardened match with K copies instead"
    )
    args = parser.parse_args()
    for path in (args.pairs, args.db_root):
        if not path.exists():
            sys.exit(
                f"{path} is not there. This benchmark needs prediction pairs (JSONL rows db_id, gold, pred) and Spider's databases "
                f"(<db_id>/<db_id>.sqlite): python {sys.argv[0]} --pairs PAIRS.jsonl --db_root DIR"
            )
    from envs.sqlite_worker import stop_workers
    from rewards.exec_match import exec_match_batch, forget

    rows = [json.loads(line) for line in args.pairs.read_text(encoding="utf-8").splitlines()][: args.limit]
    paths = [str(args.db_root / row["db_id"] / f"{row['db_id']}.sqlite") for row in rows]
    preds, golds, count = [row["pred"] for row in rows], [row["gold"] for row in rows], len(rows)
    if args.neighbours:
        from neighbours import measure  # bench/neighbours.py

        return measure(rows, paths, args.neighbours, args.workers)

    def judge(workers: int, mode: str = "official"):
        return exec_match_batch(preds, golds, paths, mode, args.keep_distinct, 10.0, None, workers)

    def plain() -> list[bool]:
        return [reference(p, g, path, args.keep_distinct) for p, g, path in zip(preds, golds, paths, strict=True)]

    print(
        f"{count} pairs, {len(set(zip(golds, paths, strict=True)))} golds, {len(set(paths))} databases, keep_distinct={args.keep_distinct}"
    )
    expected, base = timed("reference, 1 process", count, plain)
    for workers in sorted({1, args.workers}):
        stop_workers()
        forget()
        verdicts, _ = timed(f"ours cold, {workers} worker(s)", count, lambda n=workers: judge(n), base)
        forget()
        timed(f"ours gold known, {workers} worker(s)", count, lambda n=workers: judge(n), base)
        timed(f"ours warm, {workers} worker(s)", count, lambda n=workers: judge(n), base)
    print(f"ours = reference: {sum(v.correct is e for v, e in zip(verdicts, expected, strict=True))} of {count}")
    key = "official_keep_distinct" if args.keep_distinct else "official"
    if all(key in row for row in rows):
        print(
            f"ours = official tool: {sum(v.correct is (row[key] == 1) for v, row in zip(verdicts, rows, strict=True))} of {count}"
        )
    strict = judge(args.workers, "strict")
    pairs = Counter((str(v.correct), str(s.correct)) for v, s in zip(verdicts, strict, strict=True))
    print("official -> strict: " + ", ".join(f"{a} -> {b}: {n}" for (a, b), n in sorted(pairs.items())))
    hostile_batch(rows, paths, args.timeout, args.workers)


if __name__ == "__main__":
    main()
