"""The names and types of TRL's SFTConfig and GRPOConfig, read from their source text.

Importing them would take ten seconds; `--help` and a typo in a recipe must answer at once.
"""

import ast
import functools
import importlib.util
import sys
from pathlib import Path

OUTSIDE = "error: {} is not installed for this Python. Run ./step1_env.sh, then: source .venv/bin/activate"


@functools.cache
def trl_fields(section: str) -> dict[str, str]:
    """Field name -> annotation text of SFTConfig or GRPOConfig, bases included."""
    if not importlib.util.find_spec("trl"):
        sys.exit(OUTSIDE.format("trl"))
    trl = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "trainer"
    transformers = Path(importlib.util.find_spec("transformers").submodule_search_locations[0])
    fields: dict[str, str] = {}
    for file in (transformers / "training_args.py", trl / "base_config.py", trl / f"{section}_config.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in (
                "TrainingArguments",
                "_BaseConfig",
                f"{section.upper()}Config",
            ):
                fields |= {
                    n.target.id: ast.unparse(n.annotation)
                    for n in node.body
                    if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")
                }
    return fields
