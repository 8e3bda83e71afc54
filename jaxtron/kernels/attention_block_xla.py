"""The exact block kernel in plain XLA operations: every mask, dtype, dropout and platform.

Softmax is float32. Queries are processed in slices when all scores together would be large.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtron.kernels.attention_block import BlockMask
from jaxtron.kernels.query_blocks import block_length, cut_blocks
from jaxtron.layers.dropout import AttentionDropout


class XlaBlockKernel:
    """See the module; the interface is :class:`jaxtron.kernels.attention_block.BlockKernel`."""

    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        mask: BlockMask,
        dropout: AttentionDropout | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend; ``lse`` is ``-inf`` and the output 0 where a query sees no key."""

        def attend(query: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores = _scores(query, k, scale, mask)
            peak = jnp.max(scores, axis=-1)
            peak = jnp.where(peak == -jnp.inf, 0.0, peak)
            weights = jnp.exp(scores - peak[..., None])
            total = jnp.sum(weights, axis=-1)
            p = weights / jnp.where(total == 0, 1.0, total)[..., None]
            if dropout is not None:
                p = dropout.apply(p, query["positions"])
            grouped = _by_group(p, k).astype(v.dtype)
            out = jnp.einsum("bgrst,btgd->bsgrd", grouped, v, preferred_element_type=jnp.float32)
            return out.reshape(query["q"].shape).astype(q.dtype), jnp.log(total) + peak

        length = q.shape[1]
        slices = _slices({"q": q}, mask, k)
        if slices is None:
            return attend(_whole({"q": q}, mask))
        out, lse = jax.lax.map(attend, slices)
        out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
        lse = jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1)
        return out[:, :length], lse[:, :, :length]

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        *,
        scale: float,
        mask: BlockMask,
        dropout: AttentionDropout | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of the softmax in closed form; ``dq, dk, dv`` are fp32."""

        def gradients(query: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            scores = _scores(query, k, scale, mask)
            lse_bns = jnp.swapaxes(query["lse"], 1, 2)
            p = jnp.exp(scores - lse_bns[..., None])
            grouped_dout = query["dout"].reshape(
                *query["dout"].shape[:2], k.shape[2], -1, q.shape[3]
            )
            dp = jnp.einsum(
                "bsgrd,btgd->bgrst", grouped_dout, v, preferred_element_type=jnp.float32
            ).reshape(p.shape)
            dropped = p
            if dropout is not None:
                dropped = dropout.apply(p, query["positions"])
                dp = dropout.apply(dp, query["positions"])
            delta = jnp.einsum(
                "bsnd,bsnd->bns",
                query["dout"].astype(jnp.float32),
                query["out"].astype(jnp.float32),
            )
            ds = _by_group(p * (dp - delta[..., None]) * scale, k).astype(q.dtype)
            grouped_q = query["q"].reshape(grouped_dout.shape)
            fp32 = {"preferred_element_type": jnp.float32}
            dq = jnp.einsum("bgrst,btgd->bsgrd", ds, k, **fp32).reshape(query["q"].shape)
            dk = jnp.einsum("bgrst,bsgrd->btgd", ds, grouped_q, **fp32)
            dropped = _by_group(dropped, k).astype(v.dtype)
            dv = jnp.einsum("bgrst,bsgrd->btgd", dropped, grouped_dout, **fp32)
            return dq, dk, dv

        arrays = {"q": q, "out": out, "dout": dout, "lse": jnp.swapaxes(lse, 1, 2)}
        slices = _slices(arrays, mask, k)
        if slices is None:
            return gradients(_whole(arrays, mask))
        start = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))

        def add(total: Any, query: dict[str, jax.Array]) -> Any:
            dq, dk, dv = gradients(query)
            return (total[0] + dk, total[1] + dv), dq

        (dk, dv), dq = jax.lax.scan(add, start, slices)
        dq = jnp.moveaxis(dq, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
        return dq[:, : q.shape[1]], dk, dv


def _by_group(x: jax.Array, k: jax.Array) -> jax.Array:
    """``[b, heads, s, t] -> [b, groups, heads per group, s, t]``."""
    return x.reshape(x.shape[0], k.shape[2], -1, *x.shape[2:])


def _scores(query: dict[str, jax.Array], k: jax.Array, scale: float, mask: BlockMask) -> jax.Array:
    """Scaled scores fp32 ``[b, heads, s, t]``, ``-inf`` where a key is not visible."""
    q = query["q"]
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bsgrd,btgd->bgrst", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1]) * scale
    if mask.plain and not mask.own_keys:
        return scores
    visible = BlockMask(
        query["positions"],
        mask.key_positions,
        query.get("segments"),
        mask.key_segments,
        mask.own_keys,
        mask.window,
    ).visible()
    return jnp.where(visible[:, None], scores, -jnp.inf)


def _whole(arrays: dict[str, jax.Array], mask: BlockMask) -> dict[str, jax.Array]:
    """All per-query inputs."""
    query = {**arrays, "positions": mask.query_positions}
    if mask.query_segments is not None:
        query["segments"] = mask.query_segments
    return query


def _slices(
    arrays: dict[str, jax.Array], mask: BlockMask, k: jax.Array
) -> dict[str, jax.Array] | None:
    """Per-query inputs cut into slices with a leading axis; None when one slice holds them all.

    The last slice is padded with zeros: its gradients with respect to keys are 0 because its
    ``dout`` and ``out`` are.
    """
    batch, length, heads, _ = arrays["q"].shape
    size = block_length(length, 4 * batch * heads * k.shape[1])
    if size == length:
        return None
    query = _whole(arrays, mask)
    return {n: cut_blocks(x, 0 if n == "positions" else 1, size) for n, x in query.items()}
