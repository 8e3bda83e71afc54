"""FP8 casts and matrix products by Transformer Engine's kernels, inside the manual region.

Scales are jaxtron's, so that the recipes are the same whoever multiplies: Transformer Engine casts
with a given scale, its delayed form, under either recipe. Written for Transformer Engine 2.20.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.errors import ConfigError


def require_transformer_engine(platform: str) -> None:
    """Refuse the backend ``te`` where it cannot run.

    The devices must have been asked for before (its import needs the CUDA libraries that JAX
    loads).

    Raises:
        ConfigError: no GPU, or it cannot be imported.
    """
    use = "set precision.fp8_backend to auto"
    if platform == "cpu":
        raise ConfigError(
            f"precision.fp8_backend is te, but Transformer Engine has kernels for GPUs alone: {use}"
        )
    try:
        import transformer_engine.jax.cpp_extensions.gemm  # noqa: F401
    except Exception as error:  # what a missing library raises depends on the library
        raise ConfigError(
            "precision.fp8_backend is te, but transformer_engine.jax cannot be imported "
            f"({type(error).__name__}: {error}): install transformer-engine[jax], or {use}"
        ) from error


def cast(x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Bits of ``x [m, n] / scale``, and the largest magnitude of ``x``, in one pass."""
    from transformer_engine.jax.cpp_extensions import quantize
    from transformer_engine.jax.quantize import QuantizeLayout, QuantizerFactory, ScalingMode

    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.DELAYED_TENSOR_SCALING,
        q_dtype=dtype,
        q_layout=QuantizeLayout.ROWWISE,
        scale=(1 / scale).reshape(1),
    )
    result = quantize(x, quantizer)
    return lax.bitcast_convert_type(result.data, jnp.uint8), result.amax[0]


def matmul(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    dtype: Any,
    *,
    precise: bool,
) -> jax.Array:
    """As :func:`jaxtron.precision.fp8_product.fp8_matmul`.

    Raises:
        ConfigError: a summed dimension that cuBLASLt cannot take in FP8. (XLA pads it.)
    """
    if a.shape[1] % 16:
        raise ConfigError(
            "precision.fp8_backend is te, which sums over multiples of 16 alone, but a product of "
            f"the layers sums over {a.shape[1]} elements on a device (hidden_size, "
            "ffn_hidden_size, heads or tokens of a microbatch, divided by their mesh axes): set "
            "precision.fp8_backend to auto"
        )
    # its public gemm() takes the accumulation from the environment, for all products alike
    from transformer_engine.jax.cpp_extensions.gemm import _te_gemm
    from transformer_engine.jax.quantize import ScaledTensorFactory, ScalingMode

    def scaled(values: jax.Array, scale: jax.Array) -> Any:
        return ScaledTensorFactory.create_1x(
            values,
            scale.reshape(1),
            scaling_mode=ScalingMode.DELAYED_TENSOR_SCALING,
            dq_dtype=dtype,
        )

    return _te_gemm(
        scaled(a, scale_a),
        scaled(b, scale_b),
        contracting_dims=((1,), (1,)),
        use_split_accumulator=precise,
    )
