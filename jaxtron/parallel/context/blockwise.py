"""Attention over a sequence that is split over ``context``, one block of keys after the other.

Member g of a ring of R holds chunks g and ``2 R - 1 - g`` of ``2 R`` (``layout.py``). Its queries
first attend to its own keys. In step i they attend to those of member ``s = g - i (mod R)``. Of the
four pairs of chunks, exactly two are visible, and both wholly:

============ =================================== ===================================
member       first pair (queries, keys)          second pair
============ =================================== ===================================
``s < g``    chunk g, chunk s                    chunk 2 R - 1 - g, chunk s
``s > g``    chunk 2 R - 1 - g, chunk s          chunk 2 R - 1 - g, chunk 2 R - 1 - s
============ =================================== ===================================

so every member does the same work in every step, and no invisible pair is computed. Which halves
form the pairs is data (a slice at an offset), not control flow.

Where documents are cut by themselves (``balance.py``), a member's own keys are three such pairs:
each chunk with itself, and the late queries with the early keys. So a document's tokens stand
together in every block.

Blocks come from a ring, where the next one is under way while the present one is computed (Liu et
al. 2023, arXiv:2310.01889), or from one all-gather. The backward pass goes over the blocks again:
with the ring, the gradients of keys and values travel along with them and arrive at home.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.kernels.attention_block import BlockKernel, BlockMask, merge
from jaxtron.layers.dropout import AttentionDropout
from jaxtron.parallel.context.layout import AXIS, ContextLayout


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["segment_ids", "dropout"], meta_fields=[]
)
@dataclass(frozen=True)
class BlockInputs:
    """What attention reads besides queries, keys and values; has no derivative.

    Attributes:
        segment_ids: int32 ``[b, s]`` of the whole sequence in natural order, or None.
        dropout: of this device's heads, or None; its positions are set for each block.
    """

    segment_ids: jax.Array | None
    dropout: AttentionDropout | None


@dataclass(frozen=True)
class Blockwise:
    """The static side of blockwise attention.

    Attributes:
        layout: the cut of the sequence.
        gather: fetch all blocks by one all-gather; otherwise pass them around the ring.
        length: of the whole sequence.
        scale: factor on the scores.
        window: sliding window, or None.
        kernel: computes one block.
        scattered: a document's tokens stand together in a chunk, and not in a member's two.
    """

    layout: ContextLayout
    gather: bool
    length: int
    scale: float
    window: int | None
    kernel: BlockKernel
    scattered: bool = False

    @property
    def chunk(self) -> int:
        """Tokens of one chunk."""
        return self.length // (2 * self.layout.ring)

    def member(self) -> jax.Array:
        """This device's number in its ring."""
        return self.layout.member() // self.layout.all_to_all

    def send(self, tree: Any) -> Any:
        """Pass arrays on to the next member of the ring."""
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, self.layout.next_in_ring()), tree)

    def mask(
        self, inputs: BlockInputs, query_chunks: Any, key_chunks: Any, own_keys: bool
    ) -> BlockMask:
        """Mask between chunks given by their numbers in the sequence."""

        def positions(chunks: Any) -> jax.Array:
            starts = [c * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32) for c in chunks]
            return jnp.concatenate(starts)

        def segments(chunks: Any) -> jax.Array | None:
            ids = inputs.segment_ids
            if ids is None:
                return None
            parts = [lax.dynamic_slice_in_dim(ids, c * self.chunk, self.chunk, 1) for c in chunks]
            return jnp.concatenate(parts, axis=1)

        return BlockMask(
            query_positions=positions(query_chunks),
            key_positions=positions(key_chunks),
            query_segments=segments(query_chunks),
            key_segments=segments(key_chunks),
            own_keys=own_keys,
            window=self.window,
        )

    def arguments(self, inputs: BlockInputs, mask: BlockMask) -> dict[str, Any]:
        """Keyword arguments of the kernel for a block."""
        dropout = inputs.dropout
        if dropout is not None:
            dropout = AttentionDropout(
                key=dropout.key,
                rate=dropout.rate,
                rows=dropout.rows,
                heads=dropout.heads,
                query_positions=mask.query_positions,
                key_positions=mask.key_positions,
                generator=dropout.generator,
            )
        return {"scale": self.scale, "mask": mask, "dropout": dropout}

    def own(self, inputs: BlockInputs) -> dict[str, Any]:
        """Arguments for a member's queries with its own keys."""
        chunks = self._chunks(self.member())
        return self.arguments(inputs, self.mask(inputs, chunks, chunks, True))

    def own_pairs(self, inputs: BlockInputs) -> list[Any]:
        """The same in three pairs of chunks, in the form of :meth:`pairs`."""
        chunks = self._chunks(self.member())
        return [
            (
                jnp.int32(q_half),
                jnp.int32(k_half),
                self.arguments(
                    inputs, self.mask(inputs, [chunks[q_half]], [chunks[k_half]], q_half == k_half)
                ),
            )
            for q_half, k_half in ((0, 0), (1, 1), (1, 0))
        ]

    def pairs(self, source: jax.Array, inputs: BlockInputs) -> list[Any]:
        """``(query half, key half, kernel arguments)`` of both visible pairs with a member."""
        late = (source > self.member()).astype(jnp.int32)
        queries, keys = self._chunks(self.member()), self._chunks(source)
        pairs = []
        # half 0 is the early chunk of a member, half 1 the late one
        for q_half, k_half in ((late, jnp.int32(0)), (jnp.int32(1), late)):
            q_chunk = jnp.where(q_half == 0, queries[0], queries[1])
            k_chunk = jnp.where(k_half == 0, keys[0], keys[1])
            mask = self.mask(inputs, [q_chunk], [k_chunk], False)
            pairs.append((q_half, k_half, self.arguments(inputs, mask)))
        return pairs

    def _chunks(self, member: jax.Array) -> tuple[jax.Array, jax.Array]:
        return member, 2 * self.layout.ring - 1 - member


def _half(x: jax.Array, half: jax.Array, axis: int = 1) -> jax.Array:
    """Half 0 or 1 of ``axis``."""
    size = x.shape[axis] // 2
    return lax.dynamic_slice_in_dim(x, half * size, size, axis)


def _put_half(x: jax.Array, value: jax.Array, half: jax.Array, axis: int = 1) -> jax.Array:
    """``x`` with half 0 or 1 of ``axis`` replaced."""
    return lax.dynamic_update_slice_in_dim(x, value, half * value.shape[axis], axis)


def _add_half(x: jax.Array, value: jax.Array, half: jax.Array) -> jax.Array:
    """Add fp32 ``value`` to half 0 or 1 of axis 1."""
    return _put_half(x, _half(x, half) + value.astype(x.dtype), half)


def _where_visible(mask: BlockMask, compute: Any, otherwise: Any) -> Any:
    """``compute()``; with a window or documents, ``otherwise`` when no pair can be visible."""
    if mask.plain or mask.own_keys:
        return compute()
    return lax.cond(mask.any_visible(), compute, lambda: otherwise)


def _merged(kernel: BlockKernel, before: Any, operands: Any, arguments: dict[str, Any]) -> Any:
    """``(out, lse)`` of some queries with one more block of keys."""
    out, lse = before
    return merge(out, lse, *kernel.forward(*operands, **arguments))


def _gradients(kernel: BlockKernel, operands: Any, arguments: dict[str, Any]) -> Any:
    """A block's share of the gradients, in fp32."""
    return tuple(x.astype(jnp.float32) for x in kernel.backward(*operands, **arguments))


def _other_blocks(
    plan: Blockwise, k: jax.Array, v: jax.Array
) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
    """``(member, its keys, its values)`` of all other members of the ring, nearest first."""
    ring, member = plan.layout.ring, plan.member()
    if ring == 1:
        return
    if plan.gather:
        block = lax.all_gather((k, v), AXIS, axis_index_groups=plan.layout.sequences())
    else:
        block = plan.send((k, v))
    for step in range(1, ring):
        source = (member - step) % ring
        if plan.gather:
            k_block, v_block = (lax.dynamic_index_in_dim(x, source, 0, False) for x in block)
        else:
            k_block, v_block = block
            if step + 1 < ring:
                block = plan.send(block)  # does not wait for what is computed with this one
        yield source, k_block, v_block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_attention(
    plan: Blockwise, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BlockInputs
) -> jax.Array:
    """Causal attention of this member's queries over the whole sequence.

    Args:
        plan: the static side.
        q: ``[b, s, heads, d]``; s are the tokens of one member of the ring, chunk after chunk.
        k: ``[b, s, groups, d]``.
        v: as ``k``.
        inputs: documents and dropout.

    Returns:
        ``[b, s, heads, d]`` in the dtype of ``q``.
    """
    return _forward(plan, q, k, v, inputs)[0]


def _forward(plan: Blockwise, q: jax.Array, k: jax.Array, v: jax.Array, inputs: BlockInputs) -> Any:
    def add(total: Any, pairs: list[Any], k_block: jax.Array, v_block: jax.Array) -> Any:
        """``(out, lse)`` with the keys of some pairs of chunks."""
        out, lse = total
        for q_half, k_half, arguments in pairs:
            before = _half(out, q_half), _half(lse, q_half, axis=2)
            operands = _half(q, q_half), _half(k_block, k_half), _half(v_block, k_half)
            merged = functools.partial(_merged, plan.kernel, before, operands, arguments)
            new_out, new_lse = _where_visible(arguments["mask"], merged, before)
            out = _put_half(out, new_out, q_half)
            lse = _put_half(lse, new_lse, q_half, axis=2)
        return out, lse

    if plan.scattered:
        *own, late_with_early = plan.own_pairs(inputs)
        parts = [
            plan.kernel.forward(*(_half(x, half) for x in (q, k, v)), **arguments)
            for half, _, arguments in own
        ]
        out, lse = (
            jnp.concatenate(halves, axis)
            for halves, axis in zip(zip(*parts, strict=True), (1, 2), strict=True)
        )
        total = add((out.astype(jnp.float32), lse), [late_with_early], k, v)
    else:
        out, lse = plan.kernel.forward(q, k, v, **plan.own(inputs))
        total = out.astype(jnp.float32), lse
    for source, k_block, v_block in _other_blocks(plan, k, v):
        total = add(total, plan.pairs(source, inputs), k_block, v_block)
    out, lse = total
    # Both are what the backward pass reads.
    out = checkpoint_name(out.astype(q.dtype), "core_attn")
    lse = checkpoint_name(lse, "core_attn")
    return out, (q, k, v, out, lse, inputs)


def _backward(plan: Blockwise, residuals: Any, dout: jax.Array) -> Any:
    q, k, v, out, lse, inputs = residuals
    ring, member = plan.layout.ring, plan.member()

    def add(dq: jax.Array, pairs: list[Any], k_block: jax.Array, v_block: jax.Array) -> Any:
        """``dq`` with the keys of some pairs of chunks, and the gradients of these keys."""
        block_dk, block_dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        for q_half, k_half, arguments in pairs:
            of_queries = _half(out, q_half), _half(lse, q_half, axis=2), _half(dout, q_half)
            operands = _half(q, q_half), _half(k_block, k_half), _half(v_block, k_half)
            shares = functools.partial(_gradients, plan.kernel, (*operands, *of_queries), arguments)
            nothing = tuple(jnp.zeros(x.shape, jnp.float32) for x in operands)
            pair_dq, pair_dk, pair_dv = _where_visible(arguments["mask"], shares, nothing)
            dq = _add_half(dq, pair_dq, q_half)
            block_dk = _add_half(block_dk, pair_dk, k_half)
            block_dv = _add_half(block_dv, pair_dv, k_half)
        return dq, block_dk, block_dv

    if plan.scattered:
        dq, dk, dv = add(jnp.zeros(q.shape, jnp.float32), plan.own_pairs(inputs), k, v)
    else:
        dq, dk, dv = _gradients(plan.kernel, (q, k, v, out, lse, dout), plan.own(inputs))
    if plan.gather:
        # gradients of every member's keys and values, in the members' order
        totals = tuple(
            lax.dynamic_update_index_in_dim(jnp.zeros((ring, *x.shape), x.dtype), x, member, 0)
            for x in (dk, dv)
        )
    for source, k_block, v_block in _other_blocks(plan, k, v):
        dq, block_dk, block_dv = add(dq, plan.pairs(source, inputs), k_block, v_block)
        if plan.gather:
            totals = tuple(
                lax.dynamic_update_index_in_dim(total, x, source, 0)
                for total, x in zip(totals, (block_dk, block_dv), strict=True)
            )
        else:
            # What the members before this one found for the block arrives while it is computed.
            dk, dv = plan.send((dk, dv))
            dk, dv = dk + block_dk, dv + block_dv
    if plan.gather:
        groups = plan.layout.sequences()
        dk, dv = (
            lax.psum_scatter(x, AXIS, scatter_dimension=0, axis_index_groups=groups, tiled=False)
            for x in totals
        )
    elif ring > 1:
        dk, dv = plan.send((dk, dv))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


blockwise_attention.defvjp(_forward, _backward)
