"""The embedded tasks: Spider and GSM8K in small, made on the spot from a seed, read by the same loaders.

    MINI_SQL   25 small databases (tasks/mini_schemas.py, mini_questions.py, mini_sql.py) in Spider's folder layout
    MINI_MATH  word problems (tasks/mini_math.py) as GSM8K's jsonl

Nothing is downloaded: `source(root)` makes the raw files if they are missing or of another version.
"""

from dataclasses import replace
from functools import partial

from tasks import mini_math, mini_sql
from tasks.gsm8k import GSM8K
from tasks.spider import SPIDER

MINI_SQL = replace(SPIDER, name="mini_sql", load=partial(SPIDER.load, name="mini_sql"), source=mini_sql.build)
MINI_MATH = replace(
    GSM8K,
    name="mini_math",
    load=partial(GSM8K.load, name="mini_math", levels={1: "easy", 2: "medium", 3: "hard"}),  # by steps
    source=mini_math.build,
)
