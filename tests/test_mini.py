"""The embedded tasks: what they promise is checked on the data that users get (default seed and sizes)."""

import json
import re
import sqlite3
from collections import Counter
from fractions import Fraction

import pytest
import sqlglot
from sqlglot import exp

from envs import ENVIRONMENTS
from tasks import mini_math, mini_sql
from tasks.base import HARDNESS, Rejected
from tasks.mini import MINI_MATH, MINI_SQL
from tasks.mini_schemas import EVAL

SPLITS = ("train", "eval")


@pytest.fixture(scope="module")
def sql_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("raw") / "mini_sql"
    MINI_SQL.source(str(root))
    return root


@pytest.fixture(scope="module")
def math_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("raw") / "mini_math"
    MINI_MATH.source(str(root))
    return root


@pytest.fixture(scope="module")
def sql_rows(sql_root):
    return {split: list(MINI_SQL.load(split, str(sql_root))) for split in SPLITS}


@pytest.fixture(scope="module")
def math_rows(math_root):
    return {split: list(MINI_MATH.load(split, str(math_root))) for split in SPLITS}


def problems(root, split):
    lines = (root / {"train": "train.jsonl", "eval": "test.jsonl"}[split]).read_text().splitlines()
    return [json.loads(line) for line in lines]


def connect(path):
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["sql", "math"])
def test_loaders_accept_every_row(task, request):
    rows = request.getfixturevalue(f"{task}_rows")
    assert not [r for split in SPLITS for r in rows[split] if isinstance(r, Rejected)]
    assert len(rows["train"]) >= 900 and len(rows["eval"]) >= 200
    assert {r["task"] for split in SPLITS for r in rows[split]} == {f"mini_{task}"}
    questions = Counter(r["question"] for split in SPLITS for r in rows[split])
    assert max(questions.values()) == 1, [q for q, n in questions.items() if n > 1]
    odd = [
        q for q in questions if re.search(r"[\[\]{}|~]|\s[.?,]|  |^[a-z]| \d+\.0\b", q) or not re.search(r"[.?]$", q)
    ]
    assert not odd


@pytest.mark.parametrize(
    "module, files",
    [(mini_sql, ("train_spider.json", "dev.json", "tables.json")), (mini_math, ("train.jsonl", "test.jsonl"))],
)
def test_same_seed_same_data(module, files, tmp_path):
    sizes = {"train": 95, "eval": 24}
    one, two, other = (module.build(tmp_path / n, seed, sizes) for n, seed in (("1", 7), ("2", 7), ("3", 8)))
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert (one / files[0]).read_bytes() != (other / files[0]).read_bytes()
    for path in one.rglob("*.sqlite"):
        dumps = [list(connect(root / path.relative_to(one)).iterdump()) for root in (one, two, other)]
        assert dumps[0] == dumps[1] != dumps[2]


def test_rebuilt_only_when_something_differs(tmp_path):
    sizes = {"train": 40, "eval": 8}
    root = mini_math.build(tmp_path / "m", 1, sizes)
    (root / "train.jsonl").write_text("touched")
    mini_math.build(root, 1, sizes)
    assert (root / "train.jsonl").read_text() == "touched"
    mini_math.build(root, 2, sizes)
    assert len(problems(root, "train")) == 40
    stamp = json.loads((root / "build.json").read_text())
    (root / "build.json").write_text(json.dumps(stamp | {"version": "older"}))
    (root / "train.jsonl").write_text("touched")
    mini_math.build(root, 2, sizes)
    assert len(problems(root, "train")) == 40
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_interrupted_build_leaves_the_old_folder(tmp_path):
    root = mini_math.build(tmp_path / "m", 1, {"train": 40, "eval": 8})
    before = (root / "train.jsonl").read_bytes()

    def stopped(folder):
        (folder / "train.jsonl").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mini_sql.write_folder(root, {"version": "next"}, stopped)
    assert (root / "train.jsonl").read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_folder_of_someone_else_is_not_replaced(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(FileExistsError, match="train.jsonl but no build.json"):
        mini_math.build(tmp_path)
    assert (tmp_path / "train.jsonl").read_text() == "mine"


# ---- mini_sql --------------------------------------------------------------------------------------------------------


def test_databases_are_disjoint_and_of_many_shapes(sql_root, sql_rows):
    names = {split: {r["db_id"] for r in sql_rows[split]} for split in SPLITS}
    assert not names["train"] & names["eval"] and names["eval"] == set(EVAL)
    assert len(names["train"] | names["eval"]) >= 16
    seen = Counter()
    for path in (sql_root / "database").rglob("*.sqlite"):
        db = connect(path)
        tables = [t for (t,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert 2 <= len(tables) <= 5
        assert not db.execute("PRAGMA foreign_key_check").fetchall()
        for table in tables:
            rows = db.execute(f'SELECT * FROM "{table}"').fetchall()
            columns = db.execute(f'PRAGMA table_info("{table}")').fetchall()
            seen["foreign keys"] += bool(db.execute(f'PRAGMA foreign_key_list("{table}")').fetchall())
            seen["NULL"] += any(None in row for row in rows)
            seen["duplicates"] += len(set(rows)) < len(rows)
            seen["dates"] += any(re.fullmatch(r"\d{4}-\d\d-\d\d", str(v)) for v in rows[0])
            seen["spaces"] += " " in table or any(" " in c[1] for c in columns)
            seen["capitals"] += any(c[1] != c[1].lower() for c in columns)
    assert all(seen[k] >= 3 for k in ("foreign keys", "NULL", "duplicates", "dates", "spaces", "capitals")), seen


def test_tables_json_describes_the_files(sql_root):
    for entry in json.loads((sql_root / "tables.json").read_text()):
        db = connect(sql_root / "database" / entry["db_id"] / f"{entry['db_id']}.sqlite")
        tables, columns = entry["table_names_original"], entry["column_names_original"]
        found = [[i, c[1]] for i, t in enumerate(tables) for c in db.execute(f'PRAGMA table_info("{t}")')]
        assert columns == [[-1, "*"], *found]
        assert len(columns) == len(entry["column_names"]) == len(entry["column_types"])
        linked = {
            (tables[columns[a][0]], columns[a][1], tables[columns[b][0]], columns[b][1])
            for a, b in entry["foreign_keys"]
        }
        assert linked == {(t, f[3], f[2], f[4]) for t in tables for f in db.execute(f'PRAGMA foreign_key_list("{t}")')}


@pytest.mark.parametrize("split", SPLITS)
def test_levels_are_spread(sql_rows, split):
    share = {k: v / len(sql_rows[split]) for k, v in Counter(r["hardness"] for r in sql_rows[split]).items()}
    assert set(share) == set(HARDNESS) and share["easy"] >= 0.4 and min(share.values()) >= 0.08, share
    by_database = Counter((r["db_id"], r["hardness"]) for r in sql_rows[split])
    assert all(by_database[r["db_id"], level] for r in sql_rows[split] for level in HARDNESS)


def test_kinds_of_sql_are_all_there(sql_rows):
    kinds = "JOIN/GROUP BY/HAVING/NOT IN (SELECT/> (SELECT/INTERSECT/EXCEPT/UNION/LIMIT 1/LIMIT 3/DISTINCT/BETWEEN/LIKE"
    for split in SPLITS:
        text = "\n".join(r["gold"] for r in sql_rows[split])
        assert not [kind for kind in f"{kinds}/IS NULL/ OR / AND /AVG(/SUM(/!=".split("/") if kind not in text]


def test_gold_runs_and_says_something(sql_rows):
    rows = sql_rows["train"] + sql_rows["eval"]
    empty = 0
    for r in rows:
        answer = connect(r["db_path"]).execute(r["gold"]).fetchall()
        empty += not answer or all(v is None for row in answer for v in row) or answer == [(0,)]
    assert empty == 0


def test_questions_name_every_value_of_their_gold(sql_rows):
    for r in sql_rows["train"] + sql_rows["eval"]:
        tree = sqlglot.parse_one(r["gold"], read="sqlite")
        for literal in tree.find_all(exp.Literal):
            if isinstance(literal.parent, exp.Limit) and literal.name == "1":
                continue
            assert literal.name.strip("%") in r["question"], (literal.name, r["question"], r["gold"])


def test_no_ties_where_order_decides(sql_rows):
    """Every ORDER BY: the sort values of what is returned, and of the first row cut off, are all different."""
    checked = 0
    for r in sql_rows["train"] + sql_rows["eval"]:
        tree = sqlglot.parse_one(r["gold"], read="sqlite")
        order, limit = tree.args.get("order"), tree.args.get("limit")
        if not order:
            continue
        [key] = order.expressions
        widened = tree.copy().select(key.this.copy().as_("sort_value"))
        if limit:
            widened = widened.limit(int(limit.expression.name) + 1)
        values = [row[-1] for row in connect(r["db_path"]).execute(widened.sql("sqlite"))]
        assert None not in values and len(set(values)) == len(values), (r["question"], values)
        checked += 1
    assert checked > 100


def test_no_null_groups_and_no_lost_rows_in_not_in(sql_rows):
    for r in sql_rows["train"] + sql_rows["eval"]:
        if " NOT IN (SELECT" in r["gold"] or "GROUP BY" in r["gold"]:
            db = connect(r["db_path"])
            if inner := re.search(r"NOT IN \((SELECT [^()]*)\)", r["gold"]):
                assert (None,) not in db.execute(inner[1]).fetchall(), r["gold"]
            else:
                assert not [row for row in db.execute(r["gold"]) if None in row], r["gold"]


def test_answers_tell_wrong_queries_apart(sql_rows):
    """The nearest slips (condition forgotten, sign or direction turned, other aggregate) give another result."""
    slips = [
        (r" WHERE [^()]*$", ""),
        (" > ", " < "),
        (" DESC", ""),
        ("MAX", "MIN"),
        ("AVG", "SUM"),
        ("INTERSECT|EXCEPT", "UNION"),
    ]
    slipped = 0
    for r in sql_rows["eval"]:
        db = connect(r["db_path"])
        right = db.execute(r["gold"]).fetchall()
        for pattern, new in slips:
            wrong = re.sub(pattern, new, r["gold"], count=1)
            if wrong != r["gold"]:
                got = db.execute(wrong).fetchall()
                assert got != right if "ORDER BY" in wrong else sorted(got, key=repr) != sorted(right, key=repr), wrong
                slipped += 1
    assert slipped > 100


def test_sql_trajectories_score(sql_rows):
    env = ENVIRONMENTS["sql"]()
    for r in sql_rows["train"][::45] + sql_rows["eval"][::12]:
        completion = MINI_SQL.trajectory(r, env)  # raises unless the reward is 1.0
        assert completion[0]["tool_calls"][0]["function"]["arguments"]["query"] == r["gold"]


# ---- mini_math -------------------------------------------------------------------------------------------------------


def exact(expression):
    """An arithmetic expression in exact fractions, by its own small grammar (none of the code under test)."""
    total = Fraction(0)
    for sign, product in re.findall(r"(^|[-+])([^-+]+)", expression):
        value, *rest = re.split(r"([*/])", product)
        value = Fraction(value)
        for operator, operand in zip(rest[::2], rest[1::2], strict=True):
            value = value * Fraction(operand) if operator == "*" else value / Fraction(operand)
        total += -value if sign == "-" else value
    return total


@pytest.mark.parametrize("split", SPLITS)
def test_annotations_are_exact_and_the_last_is_the_answer(math_root, split):
    for p in problems(math_root, split):
        steps = re.findall(r"<<([^<>=]+)=([^<>=]+)>>(\S+?)(?=[.,]?(?:\s|$))", p["answer"])
        assert 1 <= len(steps) <= 5, p
        known = set(re.findall(r"\d+(?:\.\d+)?", p["question"]))
        values = {Fraction(v) for v in known}
        for expression, result, shown in steps:
            assert exact(expression) == Fraction(result) > 0 and shown == result, p
            for number in re.findall(r"\d+(?:\.\d+)?", expression):  # out of the question, or found before
                assert Fraction(number) in values or number in ("2", "4", "100"), (number, p)
            values.add(Fraction(result))
        assert p["answer"].splitlines()[-1] == f"#### {steps[-1][1]}"


def test_most_steps_need_a_calculator(math_root):
    steps = [s for p in problems(math_root, "train") for s in re.findall(r"<<([^=]+)=(\d+)", p["answer"])]
    hard = [e for e, result in steps if len(result) >= 3]
    assert len(hard) > 0.8 * len(steps)


def test_steps_are_spread(math_rows):
    for split in SPLITS:
        share = Counter(r["hardness"] for r in math_rows[split])
        assert share["easy"] >= 0.3 * len(math_rows[split]) and min(share[k] for k in ("medium", "hard")) >= 30


def test_train_and_test_share_no_name_and_no_numbers(math_root):
    text = {split: [p["question"] for p in problems(math_root, split)] for split in SPLITS}
    pools = {split: set("/".join(mini_math.NAMES[split]).split("/")) for split in ("train", "test")}
    assert not pools["train"] & pools["test"]
    assert not [q for q in text["train"] if set(re.findall(r"\w+", q)) & pools["test"]]
    assert not [q for q in text["eval"] if set(re.findall(r"\w+", q)) & pools["train"]]
    numbers = {
        split: {tuple(sorted(re.findall(r"<<[^>]+>>", p["answer"]))) for p in problems(math_root, split)}
        for split in SPLITS
    }
    assert not numbers["train"] & numbers["eval"]


def test_held_out_stories_are_met_in_test_only(math_root):
    stories = mini_math.STORIES
    assert sum(not s.held_out for s in stories) >= 25 and sum(s.held_out for s in stories) >= 3

    def told(story):  # the story's solution with anything in its holes
        pattern = re.sub(r"\\?\$?<\w=[^>]*>", ".+", re.sub(r"\\\[.*?\\\]", ".*", re.escape(story.solution)))
        return re.compile(re.sub(r"\\\{\w+\\\}", ".+", pattern) + r"\n####.*")

    answers = {split: [p["answer"] for p in problems(math_root, split)] for split in SPLITS}
    for story in stories:
        found = {split: sum(bool(told(story).fullmatch(a)) for a in answers[split]) for split in SPLITS}
        assert found["eval"] and bool(found["train"]) != story.held_out, (story.text, found)


def test_math_trajectories_score(math_rows):
    env = ENVIRONMENTS["calculator"]()
    for r in math_rows["train"][::10] + math_rows["eval"][::4]:
        assert MINI_MATH.trajectory(r, env)[-1]["content"].endswith(f"<answer>{r['gold']}</answer>")
