"""A training step in plain JAX: the yardstick of this folder. One GPU, no modules, no mesh.

Llama as ``configs/llama3_8b.yaml`` describes it, with its loss of all logits at once, microbatches
in a scan, fp32 master weights, clipping and Optax's AdamW. Prints the median step time as JSON::

    python tests/perf/plain_step.py --layers 8 --sequences 8 --micro-batch 4
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

HIDDEN, FFN, HEADS, GROUPS, VOCAB, SEQ = 4096, 14336, 32, 8, 32768, 4096
CHANNELS = HIDDEN // HEADS
EPSILON, BASE = 1e-5, 5e5


def init(key: jax.Array, layers: int) -> Any:
    """fp32 weights; the layers are a list."""

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, jnp.float32)

    def layer(key: jax.Array) -> Any:
        k = jax.random.split(key, 5)
        return {
            "qkv": normal(k[0], HIDDEN, HEADS + 2 * GROUPS, CHANNELS),
            "out": normal(k[1], HEADS, CHANNELS, HIDDEN),
            "up": normal(k[2], HIDDEN, 2, FFN),
            "down": normal(k[3], FFN, HIDDEN),
            "norms": jnp.ones((2, HIDDEN)),
        }

    k = jax.random.split(key, layers + 2)
    return {
        "word": normal(k[0], VOCAB, HIDDEN),
        "head": normal(k[1], VOCAB, HIDDEN),
        "norm": jnp.ones(HIDDEN),
        "layers": [layer(each) for each in k[2:]],
    }


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPSILON)
    return (y * weight).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def loss_of(copies: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of a microbatch ``tokens [b, SEQ + 1]``."""
    frequency = BASE ** (-jnp.arange(0, CHANNELS, 2) / CHANNELS)
    angle = (jnp.arange(SEQ)[:, None] * frequency)[None, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x = copies["word"][tokens[:, :-1]]
    for w in copies["layers"]:
        y = rms_norm(x, w["norms"][0])
        q, k, v = jnp.split(jnp.einsum("bsh,hnd->bsnd", y, w["qkv"]), (HEADS, HEADS + GROUPS), 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x = x + jnp.einsum("bsnd,ndh->bsh", y, w["out"])
        u = jnp.einsum("bsh,hpf->bspf", rms_norm(x, w["norms"][1]), w["up"])
        x = x + (jax.nn.silu(u[:, :, 0]) * u[:, :, 1]) @ w["down"]
    logits = jnp.einsum("bsh,vh->bsv", rms_norm(x, copies["norm"]), copies["head"])
    logits = logits.astype(jnp.float32)
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


def step(optimizer: Any, params: Any, state: Any, tokens: jax.Array) -> Any:
    """One optimizer step over ``tokens [microbatches, b, SEQ + 1]``."""
    copies = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    def body(total: Any, microbatch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(copies, microbatch)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, (loss, grads)), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
    (loss, grads), _ = jax.lax.scan(body, (jnp.zeros(()), zeros), tokens)
    loss, grads = jax.tree.map(lambda a: a / tokens.shape[0], (loss, grads))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True, help="per step")
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    )
    params = jax.jit(functools.partial(init, layers=args.layers))(jax.random.key(0))
    state = jax.jit(optimizer.init)(params)
    run = jax.jit(functools.partial(step, optimizer), donate_argnums=(0, 1))
    shape = (args.sequences // args.micro_batch, args.micro_batch, SEQ + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, VOCAB)
    times = []
    for _ in range(args.steps + 2):
        began = time.perf_counter()
        params, state, loss = jax.block_until_ready(run(params, state, tokens))
        times.append(time.perf_counter() - began)
    print(json.dumps({"step_time_s": statistics.median(times[2:]), "loss": float(loss)}))


if __name__ == "__main__":
    main()
