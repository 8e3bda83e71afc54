"""The gated MLP as one function whose matrix products apply the activation, and its choice."""

import logging
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


def gated_mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(silu(x gate) * x up) down``: the activation, in fp32, leaves the products' registers.

    Args:
        x: bf16 ``[..., h]``.
        up: ``[h, 2, f]``, gate and up.
        down: ``[f, h]``.

    Returns:
        ``[..., h]``, and what is there when the first product has ended: nothing to compute with,
        it has no derivative. Named for ``jax.checkpoint`` are ``mlp_up`` and ``mlp_act``.
    """
    y, first = _mlp(x.reshape(-1, x.shape[-1]), up, down)
    return y.reshape(x.shape), first


@jax.custom_vjp
def _mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward(x, up, down)[0]


def _forward(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[Any, Any]:
    u, act = hopper_gate_up(x, up, blocks=multiprocessors())
    u, act = checkpoint_name(u, "mlp_up"), checkpoint_name(act, "mlp_act")
    return (jnp.dot(act, down), act), (x, u, act, up, down)


def _backward(
    residuals: Any, gs: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    (x, u, act, up, down), (g, _) = residuals, gs
    d_u = hopper_d_gate_up(g, down, u, blocks=multiprocessors())
    d_down = lax.dot_general(act, g, (((0,), (0,)), ((), ())))
    d_up = lax.dot_general(x, d_u, (((0,), (0,)), ((), ())))
    return lax.dot_general(d_u, up, (((1, 2), (1, 2)), ((), ()))), d_up, d_down


_mlp.defvjp(_forward, _backward)
