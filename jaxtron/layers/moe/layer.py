"""The mixture-of-experts block, in the place of a layer's MLP."""

import logging

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtron.errors import ConfigError
from jaxtron.kernels.grouped_matmul import choose_grouped_matmul, find_grouped_matmul
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmulSpec
from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.mlp import MLP
from jaxtron.layers.moe.capacity import expert_capacity
from jaxtron.layers.moe.dispatch import Dispatcher, DispatchPlan, dispatch_local
from jaxtron.layers.moe.dispatch_allgather import dispatch_allgather
from jaxtron.layers.moe.dispatch_alltoall import dispatch_alltoall
from jaxtron.layers.moe.dispatch_ragged import dispatch_ragged
from jaxtron.layers.moe.experts import Experts
from jaxtron.layers.moe.router import Router
from jaxtron.layers.moe.tokens import Tokens
from jaxtron.layers.parameter import normal
from jaxtron.log_once import log_once
from jaxtron.mesh.rules import LogicalRules
from jaxtron.models.config import ModelConfig

logger = logging.getLogger(__name__)

DISPATCHERS: dict[str, Dispatcher] = {
    "allgather": dispatch_allgather,
    "alltoall": dispatch_alltoall,
    "ragged": dispatch_ragged,
}
"""Dispatchers by name, as ``model.moe_token_dispatcher_type`` spells them."""


def choose_dispatcher(name: str, exchanged: int, gathered: int) -> str:
    """``model.moe_token_dispatcher_type`` with ``auto`` decided, which is logged.

    Args:
        name: of a dispatcher, or auto.
        exchanged: rows that ``alltoall`` sends from one device to another.
        gathered: rows that ``allgather`` does.
    """
    if name != "auto":
        return name
    chosen = "alltoall" if exchanged < gathered else "allgather"
    log_once(
        logger,
        f"dispatcher: {chosen} (auto); from device to device allgather sends {gathered} rows, "
        f"alltoall {exchanged}",
    )
    return chosen


def check_experts(
    config: ModelConfig, rules: LogicalRules, dtype: jnp.dtype, fp8: bool, platform: str
) -> None:
    """Refuse a dispatcher or a kernel that the hardware or the model does not allow.

    Args:
        config: the model.
        rules: over which axes experts are split.
        dtype: of the products.
        fp8: whether experts are multiplied in FP8.
        platform: ``cpu`` or ``gpu``.

    Raises:
        ConfigError: ``ragged`` on CPUs, or no kernel of ``moe_grouped_gemm_backend``.
    """
    if config.num_experts is None:
        return
    devices = rules.size("experts")
    if config.moe_token_dispatcher_type == "ragged" and devices > 1 and platform == "cpu":
        raise ConfigError(
            "model.moe_token_dispatcher_type is ragged, but XLA has no ragged exchange between "
            "CPUs: set it to alltoall, which gives the same numbers"
        )
    spec = GroupedMatmulSpec(
        rows=1,  # as for ``expected`` and ``most``, no kernel's refusal depends on the number
        experts=config.num_experts // devices,
        inner=config.hidden_size,
        outer=config.expert_ffn // rules.size("expert_mlp"),
        dtype=dtype,
        expected=1,
        most=None if config.moe_expert_capacity_factor is None else 1,
        fp8=fp8,
    )
    find_grouped_matmul(config.moe_grouped_gemm_backend, spec, platform)


class MoE(nnx.Module):
    """``y = sum_j weight_j expert_j(x) [+ shared(x)]`` over the experts that the router chose."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, output_std: float) -> None:
        self.config = config
        self.router = Router(config, rngs)
        self.experts = Experts(config, rngs, output_std)
        shared = config.moe_shared_expert_intermediate_size
        if shared is not None:
            self.shared = MLP(config, rngs, output_std, shared)
            if config.moe_shared_expert_gate:
                self.shared_gate = normal(
                    rngs, (config.hidden_size,), ("embed",), config.init_method_std
                )

    @jax.named_scope("moe")
    def __call__(
        self, x: jax.Array, inputs: LayerInputs, layer: LayerNumber
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Map the normalised stream ``x [b, s/tensor, h]`` to the update of the stream.

        Returns:
            the update; this device's piece of the auxiliary losses (fp32 scalar); and its piece of
            the load, int32 ``[experts]``: pieces add up to how many live tokens chose each expert.
        """
        region = inputs.region
        tokens = Tokens(region, whole=self.experts.split)
        t = tokens.enter(x)
        with jax.named_scope("router"):
            routing = self.router(t, tokens, inputs, layer)
        y = self._apply_experts(t, routing.experts, routing.weights, inputs, tokens)
        y = tokens.leave(y)
        if self.config.moe_shared_expert_intermediate_size is not None:
            y = y + self._shared(x, inputs)
        load = routing.counts
        if tokens.copies > 1:  # counted by the first of those that route the same tokens
            load = jnp.where(region.index("tensor") == 0, load, 0)
        return y, routing.piece, load

    @jax.named_scope("shared")
    def _shared(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        y = self.shared(x, inputs)
        if not self.config.moe_shared_expert_gate:
            return y
        gate = jnp.einsum("bsh,h->bs", x.astype(jnp.float32), self.shared_gate[...])
        return (y * jax.nn.sigmoid(gate)[..., None]).astype(y.dtype)

    def _apply_experts(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        inputs: LayerInputs,
        tokens: Tokens,
    ) -> jax.Array:
        """Experts' weighted outputs for ``x [b, t, h]``."""
        config, moe = self.config, inputs.moe
        assert moe is not None and config.num_experts is not None
        rows, length, hidden = x.shape
        topk = config.moe_router_topk
        most = None
        if config.moe_expert_capacity_factor is not None:
            parts = 1
            for axis in tokens.region.live(tokens.row_axes):
                parts *= tokens.region.sizes[axis]
            capacity = expert_capacity(
                length * parts, topk, config.num_experts, config.moe_expert_capacity_factor
            )
            most = rows * min(capacity, length)
        axes = tokens.region.live(moe.expert_axes)
        plan = DispatchPlan(tokens.region, axes, config.num_experts, most, strided=False)
        slots, _ = plan.slots(rows * length, topk)
        kernel = choose_grouped_matmul(
            config.moe_grouped_gemm_backend,
            GroupedMatmulSpec(
                rows=slots,
                experts=plan.local_experts,
                inner=hidden,
                outer=self.experts.inner,
                dtype=jnp.dtype(x.dtype),
                expected=-(-rows * length * topk * plan.group // config.num_experts),
                most=None if most is None else most * plan.group,
                fp8=self.experts.fp8,
            ),
            moe.platform,
        )
        plan = DispatchPlan(
            tokens.region,
            axes,
            config.num_experts,
            most,
            kernel.strided,
            kernel.row_tile,
            kernel.row_kernels,
        )
        dispatch = dispatch_local
        if axes:
            name = choose_dispatcher(
                config.moe_token_dispatcher_type,
                plan.rows_from_one(rows * length, topk),
                rows * length,
            )
            dispatch = DISPATCHERS[name]

        def run(rows: jax.Array, sizes: jax.Array) -> jax.Array:
            with jax.named_scope("experts"):
                return self.experts(rows, sizes, kernel)

        with jax.named_scope("dispatch"):
            y = dispatch(
                x.reshape(-1, hidden),
                experts.reshape(-1, topk),
                weights.reshape(-1, topk),
                run,
                plan,
            )
        return y.reshape(x.shape)
