"""What is learnt: one file a task. `TASKS` maps the names used in recipes to them."""

from tasks.base import COLUMNS, HARDNESS, Rejected, Task
from tasks.gsm8k import GSM8K
from tasks.medical import MEDICAL
from tasks.mini import MINI_MATH, MINI_SQL
from tasks.own_db import OWN_DB
from tasks.spider import SPIDER

TASKS = {task.name: task for task in (SPIDER, GSM8K, MINI_SQL, MINI_MATH, MEDICAL, OWN_DB)}

__all__ = ["COLUMNS", "HARDNESS", "TASKS", "Rejected", "Task"]
