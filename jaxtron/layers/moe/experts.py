"""The experts: many MLPs of one shape, applied to rows grouped by expert."""

import functools
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtron.kernels.grouped_matmul_spec import GroupedMatmul
from jaxtron.layers.activation import activate
from jaxtron.layers.parameter import Product, normal
from jaxtron.models.config import ModelConfig
from jaxtron.parallel.gradient_sum import SummedWeight
from jaxtron.precision.fp8_experts import fp8_experts
from jaxtron.precision.fp8_weight import Fp8Weight


class Experts(nnx.Module):
    """Weights of all experts; a device holds those of its ``expert`` shard.

    ``up`` is ``[experts, embed, gate and up, expert_mlp]``, ``down [experts, expert_mlp, embed]``.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, output_std: float) -> None:
        self.config = config
        assert config.num_experts is not None
        experts, embed, inner = config.num_experts, config.hidden_size, config.expert_ffn
        parts = 1 + config.gated
        self.up = normal(
            rngs,
            (experts, embed, parts, inner),
            ("experts", "embed", None, "expert_mlp"),
            config.init_method_std,
            product=Product("up", experts=True),
        )
        self.down = normal(
            rngs,
            (experts, inner, embed),
            ("experts", "expert_mlp", "embed"),
            output_std,
            product=Product("down", experts=True),
        )

    @property
    def split(self) -> bool:
        """Whether this device holds a part of the inner width."""
        return self.inner < self.config.expert_ffn

    @property
    def inner(self) -> int:
        """Inner width on this device."""
        return int(self.up.get_value().shape[-1])

    @property
    def fp8(self) -> bool:
        """Whether weights came in FP8."""
        return any(isinstance(w.get_value(), Fp8Weight) for w in (self.up, self.down))

    def __call__(
        self, rows: jax.Array, sizes: jax.Array, grouped_matmul: GroupedMatmul
    ) -> jax.Array:
        """Apply expert e to its ``sizes[e]`` rows.

        Args:
            rows: ``[M, h]``, grouped by expert.
            sizes: int32 ``[local experts]``.
            grouped_matmul: the kernel, which knows how the groups lie.

        Returns:
            ``[M, h]``; partial sums over ``tensor`` where the inner width is split.
        """
        up = self.up.get_value()
        u = _multiply(rows, up, sizes, grouped_matmul)
        u = checkpoint_name(u, "mlp_up").reshape(rows.shape[0], *up.shape[2:])
        u = checkpoint_name(_activated(u, sizes, self.config, grouped_matmul), "mlp_act")
        return _multiply(u, self.down.get_value(), sizes, grouped_matmul)


def _activated(
    u: jax.Array, sizes: jax.Array, config: ModelConfig, kernel: GroupedMatmul
) -> jax.Array:
    rows = kernel.row_kernels
    if rows is not None and config.gated and config.activation in rows.activations:
        return rows.gated(u, sizes, config.activation)
    return activate(u, config.activation)


def _multiply(
    rows: jax.Array,
    weight: jax.Array | Fp8Weight | SummedWeight,
    sizes: jax.Array,
    kernel: GroupedMatmul,
) -> jax.Array:
    if isinstance(weight, Fp8Weight):
        return fp8_experts(rows, weight, sizes, kernel)
    if isinstance(weight, SummedWeight):
        return _product(rows, *weight.take(), sizes, kernel)
    return _product(rows, weight, None, sizes, kernel)


def _matrices(weight: jax.Array) -> jax.Array:
    """``weight [experts, K, ...]`` with its output dimensions in one."""
    return weight.reshape(*weight.shape[:2], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(
    rows: jax.Array,
    weight: jax.Array,
    total: jax.Array | None,
    sizes: jax.Array,
    kernel: GroupedMatmul,
) -> jax.Array:
    """Rows times their expert's ``weight [experts, K, ...]``, output dimensions in one.

    With ``total``, a sum of gradients like the weight, the weight's gradient is added to that.

    The backward pass keeps the weight as it came: the pipeline executor knows weights among a
    microbatch's residuals by identity, and would keep a reshaped one for every microbatch.
    """
    return kernel(rows, _matrices(weight), sizes)


def _forward(
    rows: jax.Array,
    weight: jax.Array,
    total: jax.Array | None,
    sizes: jax.Array,
    kernel: GroupedMatmul,
) -> Any:
    return _product(rows, weight, total, sizes, kernel), (rows, weight, total, sizes)


def _backward(kernel: GroupedMatmul, residuals: Any, g: jax.Array) -> Any:
    rows, weight, total, sizes = residuals
    # both products are linear in what they are differentiated by: the forward one is not run again
    _, vjp = jax.vjp(lambda r, w: kernel(r, _matrices(w), sizes), rows, weight)
    d_rows, d_weight = vjp(g)
    if total is None:
        return d_rows, d_weight, None, None
    # XLA leaves d_weight out
    added = kernel.add_rows_times_rows(_matrices(total), rows, g, sizes)
    return d_rows, None, added.reshape(total.shape), None


_product.defvjp(_forward, _backward)
