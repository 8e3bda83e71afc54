"""Hidden states and logits of whole batches, through a program's own forward pass."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxtron.program import Program
from tests.parity.harness import rows_of


def _forward(program: Program, params: Any, batch: Mapping[str, Any], step: Any, head: bool) -> Any:
    placed = rows_of(program, dict(batch))

    def local(params: Any, batch: Any, step: Any) -> jax.Array:
        copies = program.plan.copies(params)
        batch = {**batch, "rows": program.objective.global_rows(*batch["tokens"].shape[:2])}

        def report(copies: Any, side: Any, x: jax.Array) -> jax.Array:
            if not head:
                return x
            weight = program.model.output_weight(copies, program.plan.fetch)
            return jnp.einsum("bsh,vh->bsv", x, weight, preferred_element_type=jnp.float32)

        computation = program.objective.computation(step, head=report)

        def one(microbatch: Any) -> jax.Array:
            return computation.objective(copies, microbatch)[1][0]

        return lax.map(one, batch)

    spec = program.placement.sharding.spec
    last = (program.rules.axes("vocab") or None) if head else None
    step_spec = None if step is None else PartitionSpec()
    function = program.manual(
        local,
        (program.specs, jax.tree.map(lambda _: spec, placed), step_spec),
        PartitionSpec(*spec, last),
    )
    out = jax.jit(function)(params, placed, step)
    out = np.asarray(jax.device_get(out))
    out = out.reshape(-1, *out.shape[2:])
    return out[:, np.argsort(program.context.layout.order(out.shape[1]))]


def hidden(
    program: Program, params: Any, batch: Mapping[str, Any], step: int | None = None
) -> np.ndarray:
    """Final hidden states ``[rows of the global batch, seq, h]``; ``step`` turns dropout on."""
    step = None if step is None else np.int32(step)
    return _forward(program, params, batch, step, head=False)


def logits(program: Program, params: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Logits ``[rows of the global batch, seq, vocab_size]``."""
    out = _forward(program, params, batch, None, head=True)
    return out[..., : program.config.model.vocab_size]


def random_params(program: Program, seed: int = 0, std: float = 0.2) -> Any:
    """Weights drawn by NumPy, on the program's devices: no initialisation to compile.

    Norm weights are near 1, padding rows of the vocabulary are zero.
    """
    vocab_size = program.config.model.vocab_size

    def draw(path: Any, shape: Any, logical: Any, sharding: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        # a stream per parameter: another model's parameters of that name and shape are the same
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        value = std * rng.standard_normal(shape.shape, np.float32)
        if "norm" in name and path[-1].key == "weight":
            value += 1
        if logical[0] == "vocab":
            value[vocab_size:] = 0
        return jax.device_put(value, sharding)

    model = program.model
    return jax.tree_util.tree_map_with_path(
        draw, model.shapes, model.logical, program.state_shardings["params"]
    )


def random_state(program: Program, seed: int = 0, std: float = 0.2) -> Any:
    """A state before the first step with :func:`random_params`."""
    zeros = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), program.abstract_state()
    )
    return {**zeros, "params": random_params(program, seed, std)}
