"""Attention over a sequence split over ``context``, by the strategy of the configuration."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.kernels.attention import dot_product_attention
from jaxtron.kernels.attention_spec import AttentionBackend
from jaxtron.layers.dropout import AttentionDropout
from jaxtron.layers.inputs import Attend
from jaxtron.parallel.context.balance import cut_documents
from jaxtron.parallel.context.blockwise import BlockInputs, Blockwise, blockwise_attention
from jaxtron.parallel.context.heads import heads_for_tokens, own_heads, tokens_for_heads
from jaxtron.parallel.context.layout import AXIS, ContextLayout

TILES_OF_A_ROW = 4
"""Shorter packed rows are computed as a whole: there is little to leave out."""


@dataclass(frozen=True)
class ContextAttention:
    """Positions and attention of one device's part of the sequence.

    Attributes:
        layout: the cut of the sequence.
        gather: fetch keys and values by an all-gather, otherwise around the ring.
        cut_documents: tokens from which a document of a packed row is cut in chunks of its own;
            None: no document is.
    """

    layout: ContextLayout
    gather: bool
    cut_documents: int | None = None

    def balanced(self, rows: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Packed rows ``{name: [rows, seq]}`` whose long documents are spread over the chunks.

        As :meth:`place` takes them, before it puts chunks on members.
        """
        if self.cut_documents is None or self.layout.chunks == 1 or "segment_ids" not in rows:
            return rows
        parts = {name: x.reshape(len(x) * self.layout.groups, -1) for name, x in rows.items()}
        cut = cut_documents(parts, self.layout.chunks, self.cut_documents)
        return {name: cut[name].reshape(x.shape) for name, x in rows.items()}

    def place(self, x: np.ndarray) -> np.ndarray:
        """Put the last axis of an array of rows in the order in which the axis holds it.

        With several groups a row is those of its groups, side by side.
        """
        layout = self.layout
        if layout.size == 1:
            return x
        rows = x.reshape(*x.shape[:-1], layout.groups, -1)
        return rows[..., layout.order(rows.shape[-1])].reshape(x.shape)

    def own_positions(self, length: int) -> jax.Array:
        """Positions in the row, int32 ``[length / size]``, of this device's tokens."""
        if self.layout.size == 1:
            return jnp.arange(length, dtype=jnp.int32)
        return self.layout.positions(length, self.layout.member())

    def whole_rows(self, x: jax.Array) -> jax.Array:
        """Whole rows ``[..., length]`` in their order from this device's part of each."""
        if self.layout.size == 1:
            return x
        gathered = lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)
        return gathered[..., np.argsort(self.layout.order(gathered.shape[-1]))]

    def attend(
        self,
        length: int,
        *,
        scale: float,
        window: int | None,
        segment_ids: jax.Array | None,
        backend: AttentionBackend,
    ) -> Attend:
        """Causal attention as layers call it, with this device's tokens.

        Args:
            length: tokens of the whole row.
            scale: factor on the scores.
            window: sliding window, or None.
            segment_ids: int32 ``[b, s]`` of this device's tokens, or None.
            backend: the attention kernel.
        """
        layout = self.layout
        if layout.size > 1 and segment_ids is not None:
            whole = lax.all_gather(
                segment_ids, AXIS, axis=1, tiled=True, axis_index_groups=layout.sequences()
            )
            segment_ids = whole[:, np.argsort(layout.order(length))]
        positions = jnp.arange(length, dtype=jnp.int32)
        tile = backend.tile
        in_tiles = (
            segment_ids is not None
            and tile is not None
            and length >= TILES_OF_A_ROW * tile
            and length % tile == 0
        )
        blockwise = Blockwise(
            layout=layout,
            gather=self.gather,
            length=length,
            scale=scale,
            window=window,
            kernel=backend.blocks,
            scattered=self.cut_documents is not None and layout.ring > 1,
        )

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, dropout: AttentionDropout | None
        ) -> jax.Array:
            if layout.all_to_all > 1:
                # the kernel's operands stand for the activations of this name
                q, k, v = (checkpoint_name(tokens_for_heads(x, layout), "qkv") for x in (q, k, v))
            if dropout is not None:
                dropout = dataclasses.replace(
                    dropout,
                    heads=own_heads(dropout.heads, layout),
                    query_positions=positions,
                    key_positions=positions,
                )
            if layout.ring > 1 or in_tiles:
                out = blockwise_attention(blockwise, q, k, v, BlockInputs(segment_ids, dropout))
            else:
                out = dot_product_attention(
                    q,
                    k,
                    v,
                    scale=scale,
                    causal=True,
                    window=window,
                    segment_ids=segment_ids,
                    dropout=dropout,
                    backend=backend,
                )
            return heads_for_tokens(out, layout)

        return attend
