"""What a training state holds beside the parameters, and how its leaves lie on the devices."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.config import Config
from jaxtron.layers.moe.expert_bias import split_buffers
from jaxtron.optim.optimizer import ROWS_APART, make_optimizer, plan_rates
from jaxtron.optim.schedule import Schedule
from jaxtron.optim.streamed import StreamedUpdate
from jaxtron.parallel.param_layout import is_layout
from jaxtron.parallel.state_sharding import moments_on_host, optimizer_state_shardings
from jaxtron.precision.fp8_delayed import DelayedScaling
from jaxtron.precision.loss_scale import LossScaler, loss_scaler

State = dict[str, Any]


@dataclass(frozen=True)
class StatePlan:
    """Who advances a training state.

    Attributes:
        optimizer: of the trained parameters.
        rates: learning rate and weight decay of a step.
        scaler: of the loss, under fp16.
        delayed: FP8 scales of the recipe ``delayed``.
        shardings: of every leaf of the state, layers in the stages' order.
        streamed_update: the update of moments that are kept in host memory.
    """

    optimizer: optax.GradientTransformation
    rates: dict[str, Schedule]
    scaler: LossScaler | None
    delayed: DelayedScaling | None
    shardings: State
    streamed_update: StreamedUpdate | None

    def initial(self, params: Any) -> State:
        """The state of new parameters but for FP8 and loss scales (traceable)."""
        zero = jnp.zeros((), jnp.int32)
        opt_state = self.optimizer.init(split_buffers(params)[0])
        return {"params": params, "opt_state": opt_state, "step": zero, "updates": zero}


def plan_state(
    config: Config,
    mesh: Mesh,
    *,
    layouts: Any,
    shapes: Any,
    logical: Any,
    delayed: DelayedScaling | None,
) -> StatePlan:
    """Plan the state of a run.

    Args:
        config: of the run; checked.
        mesh: of the job.
        layouts: the parameters' layouts.
        shapes: the parameters' shapes, layers in the stages' order.
        logical: the parameters' logical axes.
        delayed: FP8 scales that the state holds.
    """
    schedule = batch_schedule(config.train)
    steps = schedule.plan_length(config.train.steps)
    position = None if config.train.rampup_batch_size is None else schedule.full_batches
    build = functools.partial(
        make_optimizer, config.optimizer, total_steps=steps, position=position
    )
    logical = split_buffers(logical)[0]
    optimizer = build(logical_axes=logical)
    params = jax.tree.map(
        lambda lay: NamedSharding(mesh, lay.stored_spec), layouts, is_leaf=is_layout
    )
    trained = split_buffers(shapes)[0]
    moments = jax.eval_shape(optimizer.init, trained)
    on_device = optimizer_state_shardings(moments, trained, split_buffers(params)[0])
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings: State = {
        "params": params,
        "opt_state": on_device,
        "step": replicated,
        "updates": replicated,
    }
    streamed = None
    if config.optimizer.offload:
        shardings["opt_state"] = moments_on_host(moments, on_device)
        streamed = StreamedUpdate(
            lambda axes: build(logical_axes=axes),
            logical_axes=logical,
            shapes=trained,
            state=moments,
            device=on_device,
            host=shardings["opt_state"],
            rows_apart=config.optimizer.name in ROWS_APART,
        )
    scaler = loss_scaler(config.precision)
    if scaler is not None:
        shardings["loss_scale"] = jax.tree.map(lambda _: replicated, scaler.init())
    if delayed is not None:
        by_stage = NamedSharding(mesh, PartitionSpec("pipeline"))
        shardings["fp8"] = jax.tree.map(lambda _: by_stage, delayed.init())
    rates = plan_rates(config.optimizer, total_steps=steps, position=position)
    return StatePlan(optimizer, rates, scaler, delayed, shardings, streamed)
