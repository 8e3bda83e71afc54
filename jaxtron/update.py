"""From a step's gradients to the next state: clipping, skipped steps, optimizer, metrics."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxtron.layers.moe.expert_bias import join_buffers, split_buffers
from jaxtron.layers.moe.step import (
    load_metrics,
    loads_by_name,
    rows_of_layers,
    updated_buffers,
)
from jaxtron.optim.clip import clip_by_global_norm

if TYPE_CHECKING:
    from jaxtron.program import Program
    from jaxtron.state_plan import State


@jax.named_scope("optimizer")
def apply_gradients(program: "Program", state: "State", total: Any) -> tuple["State", Any]:
    """The state after the optimizer's update, and the step's metrics (traceable).

    A step without a trained token, one that fp16 overflowed and one above
    ``optimizer.grad_norm_skip_threshold`` advance ``step`` alone, not ``updates``.

    Args:
        program: the model on its mesh.
        state: before the step.
        total: the sum of :meth:`jaxtron.program.Program.add_gradients` over the step.
    """
    loss, tokens, grads, report, work, ahead, measured = total
    config = program.config
    params, buffers = split_buffers(state["params"])
    grads, _ = split_buffers(grads)
    grads, grad_norm = clip_by_global_norm(grads, config.optimizer.clip_grad)
    applies = tokens > 0
    if program.scaler is not None:  # one number for all devices: they decide alike
        finite = jnp.isfinite(grad_norm)
        applies &= finite
    threshold = config.optimizer.grad_norm_skip_threshold
    if threshold is not None:
        applies &= grad_norm <= threshold

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(functools.partial(jnp.where, applies), new, old)

    metrics = {
        "loss": loss,
        "grad_norm": grad_norm,
        **{name: rate(state["updates"]) for name, rate in program.rates.items()},
        "tokens": tokens,
        "skipped": jnp.int32(1) - applies,
        **work,
    }
    metrics |= {f"mtp_{i + 1}_loss": entry["loss"] for i, entry in enumerate(ahead)}
    if config.model.num_experts is not None:
        balance, new_buffers = _balance_experts(program, buffers, report, ahead)
        metrics |= balance
        buffers = keep(new_buffers, buffers)
    opt_state = state["opt_state"]
    if program.streamed_update is not None:
        params, opt_state = program.streamed_update(grads, opt_state, params, applies)
    else:
        updates, new_opt_state = program.optimizer.update(grads, opt_state, params)
        params = keep(jax.tree.map(jnp.add, params, updates), params)
        opt_state = keep(new_opt_state, opt_state)
    new_state = {
        "params": join_buffers(params, buffers),
        "opt_state": opt_state,
        "step": state["step"] + 1,
        "updates": state["updates"] + applies,
    }
    if program.scaler is not None:
        metrics["loss_scale"] = program.loss_scale(state)
        new_state["loss_scale"] = program.scaler.update(state["loss_scale"], finite)
    if program.delayed is not None:  # a step that updates nothing has measured all the same
        new_state["fp8"] = program.delayed.update(state["fp8"], measured)
    return new_state, metrics


def _balance_experts(program: "Program", buffers: Any, report: Any, ahead: Any) -> tuple[Any, Any]:
    """Metrics of the experts' load, and the routers' biases after the step."""
    model = program.config.model
    assert model.num_experts is not None
    depths = [entry["layer"] for entry in ahead]
    rows = sorted(rows_of_layers(model, program.order.layers).items())
    stacked = report["load"].reshape(-1, model.num_experts)[jnp.array([row for _, row in rows])]
    metrics = load_metrics(
        jnp.concatenate([stacked, *(depth["load"][None] for depth in depths)]),
        jnp.stack([jnp.sum(report["loss"]), *(depth["loss"] for depth in depths)]),
        [f"layer_{n}" for n, _ in rows] + [f"mtp_{i + 1}" for i in range(len(depths))],
        per_layer=model.moe_per_layer_logging,
    )
    loads = {"layers": loads_by_name(report["load"], model)}
    loads |= {f"mtp_{i}": depth["load"] for i, depth in enumerate(depths)}
    return metrics, {
        part: updated_buffers(value, loads[part], model) for part, value in buffers.items()
    }
