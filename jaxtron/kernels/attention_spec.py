"""What an attention kernel is asked to compute, and what a kernel backend offers."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxtron.errors import ConfigError
from jaxtron.kernels.attention_block import BlockKernel
from jaxtron.layers.dropout import AttentionDropout


@dataclass(frozen=True)
class AttentionSpec:
    """The static side of one attention call, in local (per device) sizes.

    Attributes:
        query_length: queries a row.
        key_length: keys and values a row.
        num_heads: query heads.
        num_query_groups: key/value heads; divides ``num_heads``.
        head_dim: channels of a head.
        dtype: of queries, keys and values.
        causal: query i sees keys 0..i.
        window: a query sees itself and ``window - 1`` earlier keys; None: all of them.
        segments: a query sees only keys of its own segment (packed documents).
        key_segments: keys have segment ids of their own, other than the queries'.
        dropout: probabilities are dropped.
        deterministic: two runs give the same bits.
        blocks: computed a block of keys at a time by ``AttentionBackend.blocks``; the lengths are
            a block's.

    Raises:
        ConfigError: a combination that has no meaning.
    """

    query_length: int
    key_length: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    dtype: jnp.dtype
    causal: bool = True
    window: int | None = None
    segments: bool = False
    key_segments: bool = False
    dropout: bool = False
    deterministic: bool = False
    blocks: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_query_groups:
            raise ConfigError(
                f"attention has {self.num_heads} query heads and {self.num_query_groups} key/value "
                "heads on a device; the first must be a multiple of the second"
            )
        if self.window is not None and not self.causal:
            raise ConfigError(
                f"model.window_size={self.window} needs causal attention: it counts earlier tokens"
            )
        if self.causal and self.query_length != self.key_length:
            raise ConfigError(
                f"causal attention of {self.query_length} queries over {self.key_length} keys; "
                "the lengths must be equal"
            )


@dataclass(frozen=True)
class AttentionScoring:
    """What happens to the scores ``q k^T`` of one call; see ``dot_product_attention``.

    Attributes:
        scale: factor on the scores.
        causal: query i sees keys 0..i.
        window: a query sees itself and ``window - 1`` earlier keys; None: all of them.
        segment_ids: int32 [batch, query], or None.
        key_segment_ids: int32 [batch, key]; None exactly when ``segment_ids`` is.
        dropout: drops probabilities after the softmax.
    """

    scale: float
    causal: bool
    window: int | None
    segment_ids: jax.Array | None
    key_segment_ids: jax.Array | None
    dropout: AttentionDropout | None


class AttentionBackend(Protocol):
    """A kernel for :func:`jaxtron.kernels.attention.dot_product_attention`.

    Attributes:
        name: as ``model.attention_backend`` spells it.
        fused: whether the forward pass is one of ``FUSED_ATTENTION`` (``layers/remat.py``), whose
            results stand for ``core_attn``; otherwise the output gets that name.
        blocks: the same kernel for one block of keys, with results that can be merged.
        tile: packed rows of several tiles of this many tokens go through ``blocks``, which leaves
            out what documents hide; None: ``blocks`` computes no less than the kernel itself.
    """

    name: str
    fused: bool
    blocks: BlockKernel
    tile: int | None

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        """None if the kernel computes ``spec`` exactly on ``platform``, else the reason why not."""

    def passed_over(self, spec: AttentionSpec) -> str | None:
        """Why ``auto`` prefers a later backend for ``spec``, or None."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scoring: AttentionScoring
    ) -> jax.Array:
        """Attend; shapes as in ``dot_product_attention``, already checked."""
