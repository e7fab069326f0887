"""The machinery of the steps. Imports none of tasks, envs and rewards, except through arguments."""

import os

# torch's CPU allocator asks for huge pages: without them page faults cost more than the arithmetic (decode 3x slower).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
