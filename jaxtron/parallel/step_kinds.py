"""What a training step is, where its compiler flags depend on it (``launch/xla_flags.py``)."""

from jax.sharding import Mesh

from jaxtron.config.config import Config
from jaxtron.launch.xla_flags import StepKind
from jaxtron.parallel.exchange import exchanges_in_process
from jaxtron.parallel.pipeline.layout import Placement
from jaxtron.parallel.pipeline.table import programs


def step_kinds(
    config: Config, mesh: Mesh, placement: Placement, *, exchange: bool, in_parts: bool
) -> list[StepKind]:
    """Kinds that a step has.

    Args:
        config: of the run.
        mesh: of the job.
        placement: of the layers on stages.
        exchange: whether gradients are exchanged (``reduction.py``).
        in_parts: whether tensor-parallel blocks work on parts (``tensor_parts.py``).
    """
    parallel, ragged = config.parallel, config.model.moe_token_dispatcher_type == "ragged"
    rings = (
        parallel.context_strategy == "ring"
        and mesh.shape["context"] > 1
        and not parallel.dynamic_context  # not timed
    )
    holds: dict[StepKind, bool] = {
        "branching": mesh.shape["pipeline"] > 1 and len(programs(placement).stretches) > 1,
        "exchange": exchanges_in_process(mesh, gradients=exchange, ragged=ragged),
        "permutations": in_parts or rings,
        "parts": in_parts and mesh.shape["tensor"] > 2,
    }
    return [kind for kind, found in holds.items() if found]
