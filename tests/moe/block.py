"""One MoE block on a mesh of fake devices, without the rest of a model."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxtron.layers.inputs import LayerInputs, MoEInputs, Randomness
from jaxtron.layers.moe.layer import MoE
from jaxtron.mesh.axes import AXES
from jaxtron.mesh.rules import LogicalRules, make_rules
from jaxtron.models.config import ModelConfig
from jaxtron.parallel.data_sharding import gather_copy, scatter_gradient, sum_gradient
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.reduction import Reduction
from jaxtron.parallel.region import Region

ROWS, SEQ, HIDDEN = 8, 16, 16
FP32 = Reduction(jnp.dtype("float32"))

MODEL = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": SEQ,
    "num_experts": 8,
    "moe_ffn_hidden_size": 8,
    "moe_router_topk": 2,
    # large enough that experts and choices differ clearly
    "init_method_std": 0.5,
}


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**(MODEL | changes))


def inputs_of(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    """Activations, a random cotangent, and the weights of tokens; row 1 is padding."""
    rng = np.random.default_rng(seed)
    live = np.ones((rows, SEQ), np.float32)
    live[1] = 0
    live[2, 11:] = 0
    return {
        "x": rng.normal(size=(rows, SEQ, HIDDEN)).astype(np.float32),
        "cotangent": rng.normal(size=(rows, SEQ, HIDDEN)).astype(np.float32),
        "token_weights": live / live.sum(),
    }


def block_parts(config: ModelConfig) -> tuple[Any, Any, Any]:
    """Graph, initial weights, and logical names of the block."""
    module = MoE(config, nnx.Rngs(params=0), 0.5)
    graph, state = nnx.split(module, nnx.Param)
    logical: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        node = logical
        for entry in path[:-1]:
            node = node.setdefault(str(entry), {})
        node[str(path[-1])] = tuple(variable.get_metadata("logical"))
    return graph, nnx.to_pure_dict(state), logical


def run_block(
    config: ModelConfig,
    mesh_sizes: Mapping[str, int] | None = None,
    *,
    rules: Mapping[str, Any] | None = None,
    sequence_parallel: bool = True,
    data: dict[str, np.ndarray] | None = None,
    weights: Any = None,
    microbatches: int = 1,
    step: int | None = None,
) -> dict[str, Any]:
    """Output, objective, load and all gradients of ``sum(y * cotangent) + auxiliary losses``.

    ``terms`` is the sum of the objective's absolute terms, which its rounding error scales with.
    """
    sizes = {axis: (mesh_sizes or {}).get(axis, 1) for axis in AXES}
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    mesh = Mesh(devices.reshape(*sizes.values()), AXES)
    table: LogicalRules = make_rules(rules or {}, sizes)
    region = Region(sizes, sequence_parallel and sizes["tensor"] > 1)
    graph, initial, logical = block_parts(config)
    weights = initial if weights is None else weights
    data = inputs_of() if data is None else data
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), weights)
    layouts = param_layouts(shapes, logical, table, "optim", jnp.float32)
    specs = jax.tree.map(lambda lay: lay.stored_spec, layouts, is_leaf=is_layout)
    batch_spec = PartitionSpec(None, table.axes("batch") or None, table.axes("sequence") or None)
    x_spec = PartitionSpec(
        *batch_spec[:2],
        (*table.axes("sequence"), *(("tensor",) if region.sequence_parallel else ())) or None,
    )

    def map_layouts(f: Any, *trees: Any) -> Any:
        return jax.tree.map(f, layouts, *trees, is_leaf=is_layout)

    def local(weights: Any, x: jax.Array, cotangent: jax.Array, token_weights: jax.Array) -> Any:
        copies = map_layouts(lambda lay, w: gather_copy(w, lay), weights)
        shard: Any = 0
        for axis in table.axes("batch"):
            shard = shard * sizes[axis] + lax.axis_index(axis)
        length = token_weights.shape[2]
        positions = jnp.arange(length, dtype=jnp.int32) + region.index("context") * length

        def objective(copies: Any, x: jax.Array) -> Any:
            total, outs, load = jnp.zeros(()), [], jnp.zeros(config.num_experts, jnp.int32)
            for m in range(microbatches):
                rows = token_weights.shape[1]
                randomness = None
                if step is not None:
                    first = m * (ROWS // microbatches) + shard * rows
                    randomness = Randomness(
                        config, region, 1, jnp.int32(step), first + jnp.arange(rows), positions
                    )
                inputs = LayerInputs(
                    region,
                    lambda *a: a[0],
                    None,
                    randomness,
                    dtype=jnp.dtype(jnp.float32),
                    moe=MoEInputs(
                        token_weights[m],
                        positions,
                        table.axes("experts"),
                        "cpu",
                        training=True,
                        earlier=load if m else None,
                    ),
                )
                y, piece, counts = nnx.merge(graph, copies)(x[m], inputs, 0)
                copies_of_y = 1 if region.sequence_parallel else region.tensor
                total += jnp.sum(y * cotangent[m]) / copies_of_y + piece
                outs.append(y)
                load += counts
            return total, (jnp.stack(outs), load)

        (total, (y, load)), (grads, d_x) = jax.value_and_grad(objective, (0, 1), has_aux=True)(
            copies, x
        )
        grads = map_layouts(
            lambda lay, g: sum_gradient(scatter_gradient(g, lay, FP32), lay, region, FP32),
            grads,
        )
        if not region.sequence_parallel:
            d_x = region.sum(d_x, ("tensor",))
        return region.sum(total, AXES), region.sum(load, AXES), y, d_x, grads

    cut = {
        name: a.reshape(microbatches, a.shape[0] // microbatches, *a.shape[1:])
        for name, a in data.items()
    }
    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, x_spec, x_spec, batch_spec),
        out_specs=(PartitionSpec(), PartitionSpec(), x_spec, x_spec, specs),
        check_vma=False,
    )
    total, load, y, d_x, grads = jax.jit(function)(
        weights, cut["x"], cut["cotangent"], cut["token_weights"]
    )
    whole = (ROWS, SEQ, HIDDEN)
    return {
        "objective": float(total),
        "terms": float(np.sum(np.abs(np.asarray(y) * cut["cotangent"]))),
        "load": np.asarray(load),
        "y": np.asarray(y).reshape(whole),
        "d_x": np.asarray(d_x).reshape(whole),
        "grads": jax.tree.map(np.asarray, grads),
    }


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    """All results of :func:`run_block` agree, relative to the largest value of each array.

    The objective is judged by the size of its terms, which cancel.
    """
    flat = jax.tree_util.tree_leaves_with_path(expected)
    for (path, e), a in zip(flat, jax.tree.leaves(actual), strict=True):
        scale = max(float(np.max(np.abs(e))), 1e-6)
        if path[0].key == "objective":
            scale = expected["terms"]
        error = float(np.max(np.abs(np.asarray(a, np.float64) - e))) / scale
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.2e}"
