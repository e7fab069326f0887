"""What an agent acts in. `ENVIRONMENTS` maps the value of a row's `environment` column to a class.

An environment is TRL's: every public method but `reset` is a tool, `reset(**row)` starts an episode. Instances are reused.
"""

from envs.calculator import CalculatorEnv
from envs.sql import MedicalEnv, SQLEnv

ENVIRONMENTS = {"sql": SQLEnv, "calculator": CalculatorEnv, "medical": MedicalEnv}

__all__ = ["ENVIRONMENTS", "CalculatorEnv", "MedicalEnv", "SQLEnv"]
