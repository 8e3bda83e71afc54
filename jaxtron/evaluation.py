"""What a program computes forwards alone: the loss of an evaluation, logits of the next token."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtron.mesh.axes import AXES

if TYPE_CHECKING:
    from jaxtron.program import Program


def eval_step(program: "Program", params: Any, batch: Mapping[str, jax.Array]) -> Any:
    """Sum of the loss over the batch's valid tokens, and their number (traceable)."""

    def local(params: Any, batch: Mapping[str, jax.Array]) -> Any:
        mask = batch["loss_mask"]
        microbatches = {
            **{name: array for name, array in batch.items() if name != "document_length"},
            "token_weights": mask,
            "router_weights": program.objective.live(batch),
        }
        computation = program.objective.computation()
        loss = program.executor.reports(computation, params, microbatches)
        return program.region.sum(loss, AXES), program.objective.count(mask)

    batch_specs = jax.tree.map(lambda _: program.placement.sharding.spec, dict(batch))
    function = program.manual(local, (program.specs, batch_specs), (PartitionSpec(),) * 2)
    return function(params, dict(batch))


def next_token_logits(
    program: "Program", params: Any, tokens: jax.Array, last: jax.Array
) -> jax.Array:
    """fp32 logits ``[b, vocab_size]`` of the token after position ``last [b]`` (traceable).

    ``tokens [b, s]`` are the same on every device, which takes its part of the sequence.
    """

    def local(params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
        positions = program.context.own_positions(tokens.shape[1])

        def logits(copies: Any, side: Any, x: jax.Array) -> jax.Array:
            is_last = positions == side["last"][:, None]
            x = program.region.sum(jnp.where(is_last[..., None], x, 0).sum(axis=1), ("context",))
            weight = program.model.output_weight(copies, program.plan.fetch)
            return jnp.einsum("bh,vh->bv", x, weight, preferred_element_type=jnp.float32)

        used = (positions <= last[:, None]).astype(jnp.float32)
        microbatches = {
            "tokens": tokens[None][:, :, positions],
            "last": last[None],
            "router_weights": used[None],
        }
        computation = program.objective.computation(head=logits)
        return program.executor.reports(computation, params, microbatches)

    vocab = program.rules.axes("vocab") or None
    function = program.manual(
        local,
        (program.specs, PartitionSpec(), PartitionSpec()),
        PartitionSpec(None, vocab),
    )
    return function(params, tokens, last)[:, : program.config.model.vocab_size]
