"""Token and position embeddings, split over the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtron.layers.parameter import normal
from jaxtron.models.config import ModelConfig
from jaxtron.parallel.gradient_sum import SummedWeight
from jaxtron.parallel.region import Region


def rows_of(weight: jax.Array | SummedWeight, index: jax.Array) -> jax.Array:
    """Rows ``[..., h]`` of ``weight [rows, h]``; zeros where ``index`` lies outside.

    The gradient is summed in fp32: in bf16 a token that comes hundreds of times in a microbatch
    would stop counting.
    """
    if isinstance(weight, SummedWeight):
        return _rows_of_summed(*weight.take(), index)
    return _rows_of(weight, index)


def _inside(index: jax.Array, rows: int) -> jax.Array:
    """``index`` with negative numbers, which would count from the end, moved behind it."""
    return jnp.where(index < 0, rows, index)


def _add_rows(total: jax.Array, index: jax.Array, g: jax.Array) -> jax.Array:
    """``total`` with the gradients ``g`` of its rows ``index`` added."""
    return total.at[_inside(index, len(total))].add(g.astype(jnp.float32), mode="drop")


@jax.custom_vjp
def _rows_of(weight: jax.Array, index: jax.Array) -> jax.Array:
    return weight.at[_inside(index, len(weight))].get(mode="fill", fill_value=0)


def _rows_forward(weight: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
    # an empty slice carries the weight's shape and dtype
    return _rows_of(weight, index), (index, weight[:, :0])


def _rows_backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, None]:
    index, empty = residuals
    total = jnp.zeros((len(empty), g.shape[-1]), jnp.float32)
    return _add_rows(total, index, g).astype(empty.dtype), None


_rows_of.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def _rows_of_summed(weight: jax.Array, total: jax.Array, index: jax.Array) -> jax.Array:
    return _rows_of(weight, index)


def _summed_forward(weight: jax.Array, total: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
    return _rows_of(weight, index), (total, index)


def _summed_backward(residuals: Any, g: jax.Array) -> tuple[None, jax.Array, None]:
    total, index = residuals
    return None, _add_rows(total, index, g), None


_rows_of_summed.defvjp(_summed_forward, _summed_backward)


class Embedding(nnx.Module):
    """Vocabulary-parallel lookup, plus learned positions when the model has them.

    Rows beyond ``vocab_size`` are padding: zero, never looked up, and outside the softmax.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        std = config.init_method_std
        self.word = normal(
            rngs,
            (config.padded_vocab_size, config.hidden_size),
            ("vocab", "embed"),
            std,
            drawn_rows=config.vocab_size,
        )
        self.learned_positions = config.position_embedding_type == "learned_absolute"
        if self.learned_positions:
            shape = (config.max_position_embeddings, config.hidden_size)
            self.position = normal(rngs, shape, ("position", "embed"), std)

    @jax.named_scope("embedding")
    def lookup(self, tokens: jax.Array, region: Region) -> jax.Array:
        """Word embeddings ``[b, s/tensor, h]`` of ``tokens [b, s]``, still to be summed.

        Each pipeline stage contributes the rows it holds: the sum over ``pipeline`` is the result.

        Args:
            tokens: ids below ``vocab_size`` (checked on the host when a batch is made).
            region: the manual region.
        """
        word = self.word.get_value()
        return region.reduce_sequence(rows_of(word, tokens - region.vocab_start(word.shape[0])))

    @jax.named_scope("embedding")
    def __call__(self, x: jax.Array, positions: jax.Array, region: Region) -> jax.Array:
        """Residual stream from the summed word embeddings ``x [b, s/tensor, h]``.

        Args:
            x: as :meth:`lookup` gives them, summed over ``pipeline``.
            positions: ``[s]`` or ``[b, s]`` positions within the document.
            region: the manual region.
        """
        if self.learned_positions:
            own = region.own_sequence(positions, axis=positions.ndim - 1)
            x = x + self.position[...][own].astype(x.dtype)
        return x
