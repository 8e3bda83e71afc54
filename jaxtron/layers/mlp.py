"""The feed-forward block."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtron.kernels.gated_mlp import GatedMlpSpec, gated_mlp
from jaxtron.layers.activation import activate
from jaxtron.layers.inputs import LayerInputs
from jaxtron.layers.linear import Weight, linear_of_parts
from jaxtron.layers.parameter import Product, normal, zeros
from jaxtron.models.config import ModelConfig
from jaxtron.precision.fp8_mlp import fp8_gated_mlp
from jaxtron.precision.fp8_weight import Fp8Weight


class MLP(nnx.Module):
    """``down(act(up x))``, or ``down(act(gate x) * up x)`` for gated activations.

    Gated: Shazeer 2020, arXiv:2002.05202. The inner width ``mlp`` is split over ``tensor``.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        output_std: float,
        ffn_hidden_size: int | None = None,
    ) -> None:
        self.config = config
        self.ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
        embed, inner, parts = config.hidden_size, self.ffn_hidden_size, 1 + config.gated
        # [:, 0] is the gate of a gated activation, the last the up projection
        self.up = normal(
            rngs,
            (embed, parts, inner),
            ("embed", None, "mlp"),
            config.init_method_std,
            product=Product("up"),
        )
        self.down = normal(
            rngs, (inner, embed), ("mlp", "embed"), output_std, product=Product("down")
        )
        if config.add_bias_linear:
            self.up_bias = zeros((parts, inner), (None, "mlp"))
            self.down_bias = zeros((embed,), ("embed",))

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Map the normalised stream ``x [b, s/tensor, h]`` to the update of the stream."""
        region = inputs.region
        ys = self._block(region.gather_parts(x), inputs)
        y = region.reduce_parts(ys, partial=self.down.shape[0] < self.ffn_hidden_size)
        if self.config.add_bias_linear:
            y = y + self.down_bias[...].astype(y.dtype)
        return y

    def _block(self, parts: Sequence[jax.Array], inputs: LayerInputs) -> list[jax.Array]:
        """What this device's weights make of tokens ``[..., h]``, still to be summed."""
        up, down = self.up.get_value(), self.down.get_value()
        plain = self.config.gated and not self.config.add_bias_linear
        if plain and isinstance(up, Fp8Weight) and isinstance(down, Fp8Weight):
            return fp8_gated_mlp(parts, up, down, self.config.activation, "mlp_up")
        if self._fused(parts[0], up, down, inputs):
            return gated_mlp(parts, up, down)
        us = []
        for (u,) in linear_of_parts(parts, [up], arrives="input"):
            if self.config.add_bias_linear:
                u = u + self.up_bias[...].astype(u.dtype)
            u = checkpoint_name(u, "mlp_up")
            us.append(checkpoint_name(activate(u, self.config.activation), "mlp_act"))
        return [y for (y,) in linear_of_parts(us, [down], arrives="gradient")]

    def _fused(self, x: jax.Array, up: Weight, down: Weight, inputs: LayerInputs) -> bool:
        """Whether one kernel multiplies and applies the activation."""
        if inputs.gated_mlp is None:
            return False
        fp8 = any(isinstance(weight, Fp8Weight) for weight in (up, down))
        spec = GatedMlpSpec(
            tokens=x.size // x.shape[-1],
            hidden=x.shape[-1],
            inner=down.shape[0],
            activation=self.config.activation,
            bias=self.config.add_bias_linear,
            dtype="fp8" if fp8 else str(x.dtype),
        )
        return inputs.gated_mlp.use(spec)
