"""The gated MLP as one function whose matrix products apply the activation, and its choice."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtron.errors import ConfigError
from jaxtron.kernels.gated_mlp_hopper import COLUMNS, DEPTH, ROWS_AT_ONCE, STAGES
from jaxtron.kernels.gated_mlp_hopper import d_gate_up as hopper_d_gate_up
from jaxtron.kernels.gated_mlp_hopper import gate_up as hopper_gate_up
from jaxtron.kernels.grouped_matmul_hopper import multiprocessors
from jaxtron.log_once import log_once

logger = logging.getLogger(__name__)

Parts = tuple[jax.Array, ...]


@dataclass(frozen=True)
class GatedMlpSpec:
    """One MLP's static side, in local sizes.

    Attributes:
        tokens: rows of a product.
        hidden: width of the stream.
        inner: width between the projections.
        activation: ``model.activation``.
        bias: projections have biases.
        dtype: of the products; ``fp8`` if one of them is.
    """

    tokens: int
    hidden: int
    inner: int
    activation: str
    bias: bool
    dtype: str


@dataclass(frozen=True)
class GatedMlpKernels:
    """Decides which MLPs are computed by :func:`gated_mlp`.

    Attributes:
        name: ``model.gated_mlp_backend``.
        platform: ``cpu`` or ``gpu``.
        stages: of the pipeline.
        recomputed: activations by name that ``train.recompute`` computes again.
    """

    name: str
    platform: str
    stages: int
    recomputed: frozenset[str] = frozenset()

    def use(self, spec: GatedMlpSpec) -> bool:
        """Whether :func:`gated_mlp` computes ``spec``; the choice is logged.

        Raises:
            ConfigError: it was asked for by name and cannot.
        """
        elsewhere = self.platform == "cpu" or spec.dtype == "fp8"  # FP8 has a way of its own
        if self.name == "xla" or (self.name == "auto" and elsewhere):
            return False
        reason = self._refusal(spec)
        if self.name == "auto":
            if reason is None and self.stages > 1:
                reason = f"it has not been timed in a pipeline, and this has {self.stages} stages"
            chosen = "mosaic_gpu" if reason is None else f"xla, because {reason}"
            log_once(logger, f"gated MLP of {spec.tokens} tokens in {spec.dtype}: {chosen} (auto)")
        elif reason is not None:
            raise ConfigError(
                f"model.gated_mlp_backend={self.name} cannot be used: {reason}; "
                "set model.gated_mlp_backend to auto or xla"
            )
        return reason is None

    def _refusal(self, spec: GatedMlpSpec) -> str | None:
        if self.platform != "gpu":
            return f"it runs on GPUs of compute capability 9.0, and this is a {self.platform}"
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        if capability != "9.0":
            return f"it runs on compute capability 9.0, and this GPU has {capability}"
        if spec.dtype != "bfloat16":
            return f"it multiplies bf16, and this MLP is in {spec.dtype}"
        if spec.activation != "swiglu" or spec.bias:
            bias = " with biases" if spec.bias else ""
            return f"it computes swiglu without biases, and this MLP is {spec.activation}{bias}"
        for what, size, unit in (
            ("tokens", spec.tokens, ROWS_AT_ONCE),
            ("the inner width", spec.inner, COLUMNS),
            ("the hidden size", spec.hidden, DEPTH),
        ):
            if size % unit:
                return f"{what} must be a multiple of {unit}, and here is {size}"
        if spec.hidden < DEPTH * STAGES:
            return f"the hidden size must be at least {DEPTH * STAGES}, and is {spec.hidden}"
        if "mlp_act" in self.recomputed and "mlp_up" not in self.recomputed:
            return (
                "train.recompute computes mlp_act again and keeps mlp_up, and both come out of one "
                "product"
            )
        return None


def gated_mlp(parts: Sequence[jax.Array], up: jax.Array, down: jax.Array) -> list[jax.Array]:
    """``(silu(x gate) * x up) down``: the activation, in fp32, leaves the products' registers.

    Args:
        parts: bf16 ``x [..., h]`` each.
        up: ``[h, 2, f]``, gate and up.
        down: ``[f, h]``.

    Returns:
        ``[..., h]`` a part; named for ``jax.checkpoint`` are ``mlp_up`` and ``mlp_act``.
    """
    ys = _mlp(tuple(x.reshape(-1, x.shape[-1]) for x in parts), up, down)
    return [y.reshape(x.shape) for x, y in zip(parts, ys, strict=True)]


@jax.custom_vjp
def _mlp(xs: Parts, up: jax.Array, down: jax.Array) -> Parts:
    return _forward(xs, up, down)[0]


def _forward(xs: Parts, up: jax.Array, down: jax.Array) -> tuple[Parts, Any]:
    us: list[jax.Array] = []
    acts: list[jax.Array] = []
    for x in xs:
        if acts:
            # XLA puts what it knows to take long beside the transfer of a part. Of this kernel it
            # knows nothing: it might wait for a part before it multiplies the one that is there.
            x, _ = lax.optimization_barrier((x, acts[-1]))
        u, act = hopper_gate_up(x, up, blocks=multiprocessors())
        us.append(checkpoint_name(u, "mlp_up"))
        acts.append(checkpoint_name(act, "mlp_act"))
    return tuple(jnp.dot(act, down) for act in acts), (xs, us, acts, up, down)


def _backward(residuals: Any, gs: Parts) -> tuple[Parts, jax.Array, jax.Array]:
    xs, us, acts, up, down = residuals
    d_us = [
        hopper_d_gate_up(g, down, u, blocks=multiprocessors()) for g, u in zip(gs, us, strict=True)
    ]
    d_xs = tuple(lax.dot_general(d_u, up, (((1, 2), (1, 2)), ((), ()))) for d_u in d_us)
    return d_xs, _over_tokens(xs, d_us), _over_tokens(acts, gs)


def _over_tokens(inputs: Sequence[jax.Array], gradients: Sequence[jax.Array]) -> jax.Array:
    """A weight's gradient: the sum over the tokens of all parts."""
    products = [
        lax.dot_general(x, g, (((0,), (0,)), ((), ())))
        for x, g in zip(inputs, gradients, strict=True)
    ]
    return functools.reduce(jnp.add, products)


_mlp.defvjp(_forward, _backward)
