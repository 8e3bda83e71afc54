"""Configuration of the optimizer and of its learning rate."""

from typing import Any, Literal

from jaxtron.config.fields import key, section


@section
class OptimizerConfig:
    """Update rule, learning-rate plan, weight decay and clipping; names are Megatron's."""

    name: str = key(
        "adamw", "Update rule: adamw, sgd, or `module:factory` for one from another package."
    )
    options: dict[str, Any] = key({}, "Keyword arguments for a `module:factory` optimizer.")
    lr: float = key(help="Largest learning rate.", ge=0)
    min_lr: float = key(0.0, "Learning rate at and after the end of the decay.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "cosine", "Form of the decay after the warm-up."
    )
    lr_decay_steps: int | None = key(
        None, "Step at which min_lr is reached [steps]; null: train.steps.", ge=1
    )
    lr_warmup_steps: int = key(0, "Steps of linear warm-up, part of the decay steps.", ge=0)
    lr_warmup_init: float = key(0.0, "Learning rate of the first step of a warm-up.", ge=0)
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = key(
        "exponential", "Form of the final decay of WSD (warm-up, stable, decay)."
    )
    lr_wsd_decay_steps: int | None = key(
        None, "Length of WSD's final decay [steps]; required with WSD.", ge=1
    )
    override_opt_param_scheduler: bool = key(
        False, "When resuming with another learning-rate plan, use the new one from there on."
    )
    weight_decay: float = key(
        0.1, "Decoupled decay (adamw) or L2 term (sgd); not on biases and vectors.", ge=0
    )
    adam_beta1: float = key(0.9, "Decay of Adam's first moment.", ge=0, lt=1)
    adam_beta2: float = key(0.95, "Decay of Adam's second moment.", ge=0, lt=1)
    adam_eps: float = key(1.0e-8, "Added to the root of Adam's second moment.", gt=0)
    sgd_momentum: float = key(0.9, "Momentum of sgd; 0: none.", ge=0, lt=1)
    clip_grad: float = key(1.0, "Largest global norm of the gradient; 0: no clipping.", ge=0)
