"""Dot-product attention: one function, several kernels, and the rule that chooses between them."""

import logging

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.errors import ConfigError
from jaxtron.kernels.attention_cudnn import CudnnAttention
from jaxtron.kernels.attention_mosaic_gpu import MosaicGpuAttention
from jaxtron.kernels.attention_spec import AttentionBackend, AttentionScoring, AttentionSpec
from jaxtron.kernels.attention_xla import XlaAttention
from jaxtron.layers.dropout import AttentionDropout
from jaxtron.log_once import log_once

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend for backend in (MosaicGpuAttention(), CudnnAttention(), XlaAttention())
}
"""Backends by name, in the order in which ``auto`` tries them."""


def choose_backend(name: str, spec: AttentionSpec, platform: str) -> AttentionBackend:
    """Pick the kernel for ``spec`` and log the choice, with the reasons of those that refused.

    Args:
        name: ``model.attention_backend``: ``auto`` takes the first backend that supports ``spec``
            and does not leave it to a faster one.
        spec: what will be computed.
        platform: ``cpu`` or ``gpu``, as in ``jax.devices()[0].platform``.

    Raises:
        ConfigError: an unknown name, or a backend asked for by name that refuses.
    """
    if name == "auto":
        refusals = []
        for backend in ATTENTION_BACKENDS.values():
            reason = backend.supports(spec, platform) or backend.passed_over(spec)
            if reason is None:
                break
            refusals.append(f"{backend.name} refused: {reason}")
        else:
            raise ConfigError(f"no attention backend computes {spec}: {'; '.join(refusals)}")
        exact_on_gpu = backend.name == "xla" and platform != "cpu"
        log_once(
            logger,
            "; ".join([f"attention backend: {backend.name} (auto)", *refusals]),
            logging.WARNING if exact_on_gpu else logging.INFO,
        )
        return backend
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"model.attention_backend is {name!r}; it must be auto or one of "
            f"{', '.join(ATTENTION_BACKENDS)}"
        )
    backend = ATTENTION_BACKENDS[name]
    reason = backend.supports(spec, platform)
    if reason is not None:
        raise ConfigError(
            f"model.attention_backend={name} cannot be used: {reason}; "
            "set model.attention_backend to auto or xla"
        )
    log_once(logger, f"attention backend: {name}")
    return backend


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    dropout: AttentionDropout | None = None,
    backend: AttentionBackend,
) -> jax.Array:
    """``softmax(scale * q k^T + mask) v`` with grouped key/value heads (GQA, MQA).

    Query head ``h`` reads key/value head ``h // (heads / groups)``. Vaswani et al. 2017,
    arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245.

    Args:
        q: queries [batch, query, heads, head_dim].
        k: keys [batch, key, groups, head_dim].
        v: values [batch, key, groups, head_dim].
        scale: factor on the scores, usually ``head_dim ** -0.5``.
        causal: query i sees keys 0..i.
        window: a query sees itself and ``window - 1`` earlier keys.
        segment_ids: int32 [batch, query], number of the document: a query sees only keys with its
            own number.
        key_segment_ids: int32 [batch, key] if the keys' numbers differ from the queries'.
        dropout: drops probabilities after the softmax.
        backend: from :func:`choose_backend`.

    Returns:
        [batch, query, heads, head_dim] in the dtype of ``q``. Keys that are not visible have no
        influence at all; a query that sees no key gives zeros.

    Raises:
        ConfigError: the backend does not compute what the arguments ask for.
    """
    spec = AttentionSpec(
        query_length=q.shape[1],
        key_length=k.shape[1],
        num_heads=q.shape[2],
        num_query_groups=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        causal=causal,
        window=window,
        segments=segment_ids is not None,
        key_segments=key_segment_ids is not None,
        dropout=dropout is not None,
    )
    reason = backend.supports(spec, platform="gpu")  # its platform was settled when it was chosen
    if reason is not None:
        raise ConfigError(f"attention backend {backend.name} was given what it refuses: {reason}")
    scoring = AttentionScoring(
        scale=scale,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        key_segment_ids=segment_ids if key_segment_ids is None else key_segment_ids,
        dropout=dropout,
    )
    out = backend(q, k, v, scoring)
    return out if backend.fused else checkpoint_name(out, "core_attn")
