"""Start a model with experts from the weights of a dense one (sparse upcycling).

Every expert begins as a copy of its layer's MLP, and routers are new. With weights that add up to 1
(softmax after the choice) the new model computes at first exactly what the dense one does.
Komatsuzaki et al. 2022 (arXiv:2212.05055); Megatron's ``--moe-use-upcycling``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.config.config import Config
from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.models.layer_pattern import layer_name
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.state_sharding import with_shardings
from jaxtron.precision.dtypes import DTYPES
from jaxtron.program import Program


def dense_config(config: Config) -> Config:
    """The configuration with the same model, but without experts and depths ahead."""
    changed: dict[str, Any] = {
        field.name: field.default
        for field in dataclasses.fields(ModelConfig)
        if field.name.startswith(("moe_", "mtp_")) or field.name == "num_experts"
    }
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changed))


def abstract_dense(program: Program) -> Any:
    """Shapes and shardings of the dense model's parameters on the program's mesh."""
    config = dense_config(program.config)
    dense = Decoder(config.model)
    # whole stacks: its layers need not divide over the stages
    logical = jax.tree.map(
        lambda names: tuple(None if name == "layers" else name for name in names),
        dense.logical,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    layouts = param_layouts(
        dense.shapes,
        logical,
        program.rules,
        config.parallel.data_sharding,
        DTYPES[config.precision.compute],
    )
    shardings = jax.tree.map(
        lambda layout: jax.sharding.NamedSharding(program.mesh, layout.stored_spec),
        layouts,
        is_leaf=is_layout,
    )
    return with_shardings(dense.shapes, shardings)


def upcycled(program: Program, dense: Any) -> Any:
    """Parameters of the program's model, placed, from those of the dense one.

    What the dense model does not have (routers, shared experts, depths of multi-token prediction)
    starts as in a new run.

    Args:
        program: of a :class:`~jaxtron.models.decoder.Decoder` with experts.
        dense: parameters as :func:`abstract_dense` describes them.
    """
    model = program.config.model
    first, experts, block = model.num_dense_layers, model.num_experts, model.layer_block
    assert experts is not None

    def build(dense: Any, seed: Any) -> Any:
        params = program.model.init(jax.random.key(seed))
        for i in range(first):
            params[f"dense_{i}"] = jax.tree.map(lambda a, i=i: a[i], dense["layers"])
        layers: dict[str, Any] = {}
        for i, has_experts in enumerate(block):
            new = params["layers"] if len(block) == 1 else params["layers"][layer_name(i)]
            stack = jax.tree.map(lambda a, i=i: a[first + i :: len(block)], dense["layers"])
            if has_experts:
                mlp, moe = stack.pop("mlp"), dict(new["moe"])
                moe["experts"] = {
                    name: jnp.repeat(mlp[name][:, None], experts, axis=1) for name in ("up", "down")
                }
                stack["moe"] = moe
            layers = stack if len(block) == 1 else {**layers, layer_name(i): stack}
        parts = {part: value for part, value in dense.items() if part != "layers"}
        return program.place_params({**params, **parts, "layers": layers})

    shardings = program.state_shardings["params"]
    return jax.jit(build, out_shardings=shardings)(dense, program.config.train.seed)
