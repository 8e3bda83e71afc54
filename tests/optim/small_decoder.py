"""A small decoder, and its parameters and optimizer state laid out on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxtron.mesh.axes import AXES
from jaxtron.mesh.mesh import make_mesh
from jaxtron.mesh.rules import make_rules
from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.state_sharding import optimizer_state_shardings


def small_decoder(**changes: Any) -> Decoder:
    """Two layers whose every matrix can be split by eight."""
    config: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "ffn_hidden_size": 32,
        "vocab_size": 64,
        "make_vocab_size_divisible_by": 8,
        "max_position_embeddings": 16,
    }
    return Decoder(ModelConfig(**{**config, **changes}))


def parameter_shardings(model: Decoder, **axes: int) -> Any:
    """Where ZeRO-3 stores the parameters on a mesh of these axes."""
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    count = 1
    for size in sizes.values():
        count *= size
    mesh = make_mesh(sizes, jax.devices()[:count])
    layouts = param_layouts(
        model.shapes, model.logical, make_rules({}, sizes), "optim_grads_params", jnp.float32
    )
    return jax.tree.map(
        lambda lay: NamedSharding(mesh, lay.stored_spec), layouts, is_leaf=is_layout
    )


def abstract_state(optimizer: Any, model: Decoder, shardings: Any) -> Any:
    """The optimizer's state for parameters that lie so: shapes with shardings."""
    shapes = jax.eval_shape(optimizer.init, model.shapes)
    placed = optimizer_state_shardings(shapes, model.shapes, shardings)
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        placed,
    )
