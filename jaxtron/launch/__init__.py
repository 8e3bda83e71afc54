"""How a job starts: SLURM or flags, compiler flags, devices, ``jax.distributed``.

Planning needs no JAX; :mod:`jaxtron.launch.initialize` carries the plan out.
"""

from jaxtron.launch.config import RuntimeConfig
from jaxtron.launch.plan import LaunchPlan, plan_launch

__all__ = ["LaunchPlan", "RuntimeConfig", "plan_launch"]
