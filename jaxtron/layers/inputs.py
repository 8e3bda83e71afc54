"""What every layer of a model sees besides the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtron.kernels.gated_mlp import GatedMlpKernels
from jaxtron.layers.dropout import AttentionDropout, dropout, dropout_key
from jaxtron.models.config import ModelConfig
from jaxtron.parallel.region import Region

Attend = Callable[[jax.Array, jax.Array, jax.Array, AttentionDropout | None], jax.Array]
LayerNumber = jax.Array | int


@dataclass(frozen=True)
class Randomness:
    """Dropout of one training step's microbatch, drawn at global indices.

    A mask is a function of (seed, step, row in the global batch, layer, site, token position,
    feature or head), so neither the mesh nor the microbatch cut changes it.

    Attributes:
        config: the dropout rates.
        region: the manual region.
        seed: ``train.seed``.
        step: steps done, int32 scalar.
        rows: ``[b]`` rows in the global batch.
        positions: ``[s]`` token positions in the row.
    """

    config: ModelConfig
    region: Region
    seed: int
    step: jax.Array
    rows: jax.Array
    positions: jax.Array

    def hidden(self, x: jax.Array, layer: LayerNumber, site: str) -> jax.Array:
        """Dropout of the residual stream's form ``x [b, s/tensor, h]`` at a named site."""
        return dropout(
            x,
            dropout_key(self.seed, self.step, layer, site),
            rate=self.config.hidden_dropout,
            rows=self.rows,
            positions=self.region.own_sequence(self.positions, axis=0),
        )

    def attention(self, heads: int, layer: LayerNumber) -> AttentionDropout | None:
        """Dropout of the attention probabilities of this device's ``heads`` query heads."""
        if self.config.attention_dropout == 0:
            return None
        split = heads < self.config.num_attention_heads
        first = self.region.index("tensor") * heads if split else 0
        return AttentionDropout(
            key=dropout_key(self.seed, self.step, layer, "attention_probabilities"),
            rate=self.config.attention_dropout,
            rows=self.rows,
            heads=first + jnp.arange(heads, dtype=jnp.int32),
            query_positions=self.positions,
            key_positions=self.positions,
        )


@dataclass(frozen=True)
class MoEInputs:
    """What mixture-of-experts blocks see besides.

    Attributes:
        token_weights: fp32 ``[b, s]``, weights of tokens in the router's losses; 0 takes a token
            out of everything: it has no expert, no count and no place in a capacity.
        positions: int32 ``[s]`` token positions in the row.
        expert_axes: mesh axes that split the experts, major first.
        platform: ``cpu`` or ``gpu``.
        training: whether a training step computes this, not an evaluation or generation.
        earlier: int32 ``[layers, experts]``, this device's piece of the load that the step's
            microbatches before put on the layers at hand, or None; a layer sees its own row.
    """

    token_weights: jax.Array
    positions: jax.Array
    expert_axes: tuple[str, ...]
    platform: str
    training: bool
    earlier: jax.Array | None = None


@dataclass(frozen=True)
class LayerInputs:
    """Side inputs of a transformer layer.

    Attributes:
        region: the verbs of the manual region.
        attend: ``(q [b,s,n,d], k [b,s,g,d], v [b,s,g,d], dropout) -> [b,s,n,d]``, the chosen kernel
            with its mask.
        rotary: tables ``(cos, sin)`` of the rotary embedding, or None.
        randomness: dropout of this step, or None when nothing is dropped.
        dtype: of what enters matrix products; the residual stream's too, unless
            ``model.fp32_residual_connection``.
        moe: of a model with experts.
        gated_mlp: decides about kernels of gated MLPs; None: XLA's.
    """

    region: Region
    attend: Attend
    rotary: tuple[jax.Array, jax.Array] | None
    randomness: Randomness | None
    dtype: jnp.dtype
    moe: MoEInputs | None = None
    gated_mlp: GatedMlpKernels | None = None

    def hidden_dropout(self, x: jax.Array, layer: LayerNumber, site: str) -> jax.Array:
        """Dropout of ``x [b, s/tensor, h]``, when there is any."""
        return x if self.randomness is None else self.randomness.hidden(x, layer, site)
