"""Output layer and cross-entropy in one, over a split vocabulary, a chunk of tokens at a time.

Logits of all tokens would be the largest array of the step (8192 tokens x 128k words in fp32 are
4 GiB).
Here a chunk's logits live only while its loss and its gradients are computed: because the loss is
the end of the objective, the forward pass already knows the gradient, and no logits are kept or
computed twice. Softmax and loss are fp32.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.parallel.gradient_sum import SummedWeight
from jaxtron.parallel.region import VOCAB_AXES, Region

# Each chunk adds to the weight's whole gradient: fewer chunks are faster, and 4096 tokens enough.
CHUNK_TOKENS = 4096
# fp32 logits of one chunk on one device: of more tokens, and of CHUNK_TOKENS, at most
SMALL_BYTES, LARGE_BYTES = 512 * 2**20, 2560 * 2**20
CHUNK_MULTIPLE = 16


@dataclass(frozen=True)
class CrossEntropy:
    """The output layer's loss.

    Attributes:
        region: the manual region; the vocabulary is split over ``VOCAB_AXES``.
        vocab_size: logical vocabulary; later rows of the weight are outside the softmax.
        z_loss_coeff: weight of ``log(Z)^2`` in the objective (PaLM, arXiv:2204.02311).
        chunk_tokens: tokens per chunk; None: 4096, or as many as SMALL_BYTES hold, or as few as
            LARGE_BYTES do.
        logits_dtype: to which logits are rounded before the softmax, which is fp32.
    """

    region: Region
    vocab_size: int
    z_loss_coeff: float = 0.0
    chunk_tokens: int | None = None
    logits_dtype: Any = jnp.float32

    @jax.named_scope("loss")
    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array | SummedWeight,
        labels: jax.Array,
        token_weights: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """This device's pieces of the objective and of the plain loss.

        Args:
            x: final hidden states ``[tokens, h]``, the same on all members of ``VOCAB_AXES``.
            weight: output weight ``[vocab/parts, h]``, this device's rows; with a sum its gradient
                is added to that.
            labels: ``[tokens]`` ids.
            token_weights: ``[tokens]`` fp32; 0 takes a token out altogether, whatever its values.

        Returns:
            ``(objective, loss)``: sums over tokens of weight times cross-entropy, the first with
            the z-loss; both divided by the devices that share a token, so that they add up.
            Only the first has a derivative.
        """
        if not isinstance(weight, SummedWeight):
            return _cross_entropy(x, weight, None, labels, token_weights, self)
        return _cross_entropy(x, *weight.take(), labels, token_weights, self)

    def chunk(self, tokens: int, rows: int) -> int:
        """Tokens per chunk for ``rows`` local vocabulary rows."""
        row_bytes = 4 * rows
        limit = max(1, min(CHUNK_TOKENS, LARGE_BYTES // row_bytes), SMALL_BYTES // row_bytes)
        limit = self.chunk_tokens or limit
        chunks = -(-tokens // limit)
        size = -(-tokens // chunks)
        if self.chunk_tokens is not None:
            return size
        # XLA copies operands whose dimensions are no multiples of 8
        return min(tokens, -(-size // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def _chunks(tokens: int, chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Cut ``[tokens, ...]`` arrays into ``[chunks, chunk, ...]``, padding with zeros."""
    count = -(-tokens // chunk)
    pad = count * chunk - tokens

    def cut(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) if pad else a
        return a.reshape(count, chunk, *a.shape[1:])

    return tuple(cut(a) for a in arrays)


def _peak_and_total(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every row of ``[t, v]`` its maximum and the sum of ``exp(logit - maximum)``, in one pass.

    Milakov and Gimelshein 2018, arXiv:1805.02867. ``-inf`` counts as the lowest fp32 number, since
    two of them, joined in any order, must not give NaN.
    """

    def join(a: Any, b: Any) -> Any:
        less = jnp.exp(-jnp.abs(a[0] - b[0]))  # of the lower of the two
        total = jnp.where(a[0] > b[0], a[1] + b[1] * less, a[1] * less + b[1])
        return jnp.maximum(a[0], b[0]), total

    lowest = jnp.finfo(jnp.float32).min
    logits = jnp.maximum(logits, lowest)  # NaN stays
    peak, total = lax.reduce((logits, jnp.ones_like(logits)), (lowest, 0.0), join, (1,))
    return peak, total


def _chunk_loss(
    ce: CrossEntropy, x: jax.Array, weight: jax.Array, labels: jax.Array, token_weights: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """Objective and loss of one chunk, and what its gradient needs."""
    region, rows = ce.region, weight.shape[0]
    valid = token_weights > 0
    x = jnp.where(valid[:, None], x, 0)
    logits = jnp.einsum("th,vh->tv", x, weight, preferred_element_type=ce.logits_dtype)
    logits = logits.astype(jnp.float32)
    if ce.logits_dtype != jnp.float32:  # XLA may leave out a rounding there and back
        info = jnp.finfo(ce.logits_dtype)
        logits = lax.reduce_precision(logits, info.nexp, info.nmant)
    first = region.vocab_start(rows)
    column = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where(column < ce.vocab_size, logits, -jnp.inf)
    own_peak, own_total = _peak_and_total(logits)
    peak = region.max(own_peak, VOCAB_AXES)
    total = region.sum(own_total * jnp.exp(own_peak - peak), VOCAB_AXES)
    log_z = jnp.log(total) + peak
    hit = column == labels[:, None]
    target = region.sum(jnp.sum(jnp.where(hit, logits, 0), axis=-1), VOCAB_AXES)
    nll = jnp.where(valid, log_z - target, 0)
    z_term = jnp.where(valid, ce.z_loss_coeff * log_z**2, 0)
    scale = token_weights / region.vocab_parts
    loss = jnp.sum(nll * scale)
    return loss + jnp.sum(z_term * scale), loss, (x, logits, log_z, hit, valid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    total: jax.Array | None,
    labels: jax.Array,
    token_weights: jax.Array,
    ce: CrossEntropy,
) -> tuple[jax.Array, jax.Array]:
    tokens = x.shape[0]
    cut = _chunks(tokens, ce.chunk(tokens, weight.shape[0]), x, labels, token_weights)

    def body(carry: Any, chunk: Any) -> Any:
        objective, loss, _ = _chunk_loss(ce, chunk[0], weight, chunk[1], chunk[2])
        return (carry[0] + objective, carry[1] + loss), None

    return lax.scan(body, (jnp.zeros(()), jnp.zeros(())), cut)[0]


def _forward(
    x: jax.Array,
    weight: jax.Array,
    total: jax.Array | None,
    labels: jax.Array,
    token_weights: jax.Array,
    ce: CrossEntropy,
) -> Any:
    tokens, h = x.shape
    cut = _chunks(tokens, ce.chunk(tokens, weight.shape[0]), x, labels, token_weights)
    # of a single chunk there is no sum, and XLA adds the gradient to the step's within the GEMM
    alone = len(cut[0]) == 1
    sum_dtype = weight.dtype if alone and total is None else jnp.float32

    def body(carry: Any, chunk: Any) -> Any:
        objective, loss, d_weight = carry
        x_c, labels_c, weights_c = chunk
        obj, plain, (x_c, logits, log_z, hit, valid) = _chunk_loss(
            ce, x_c, weight, labels_c, weights_c
        )
        slope = 1 + 2 * ce.z_loss_coeff * log_z
        d_logits = jnp.exp(logits - log_z[:, None]) * slope[:, None] - hit
        d_logits = jnp.where(valid[:, None], d_logits * weights_c[:, None], 0).astype(weight.dtype)
        d_x = jnp.einsum("tv,vh->th", d_logits, weight)
        d_weight += jnp.einsum("tv,th->vh", d_logits, x_c, preferred_element_type=sum_dtype)
        return (objective + obj, loss + plain, d_weight), d_x

    before = jnp.zeros(weight.shape, sum_dtype) if total is None else total
    start = (jnp.zeros(()), jnp.zeros(()), before)
    if alone:
        (objective, loss, d_weight), d_x = body(start, [each[0] for each in cut])
    else:
        (objective, loss, d_weight), d_x = lax.scan(body, start, cut)
    d_x = d_x.reshape(-1, h)[:tokens]
    if total is None:
        return (objective, loss), (d_x, d_weight.astype(weight.dtype), None)
    return (objective, loss), (d_x, None, d_weight)


def _backward(ce: CrossEntropy, residuals: Any, cotangents: Any) -> Any:
    d_x, d_weight, total = residuals
    slope = cotangents[0]  # 1 if there is a sum
    if d_weight is not None:
        d_weight = (d_weight * slope).astype(d_weight.dtype)
    return (d_x * slope).astype(d_x.dtype), d_weight, total, None, None


_cross_entropy.defvjp(_forward, _backward)
