"""Configuration of the optimizer and of its learning rate."""

from typing import Any, Literal

from jaxtron.config.fields import key, section


@section
class OptimizerConfig:
    """Update rule, learning-rate plan, weight decay and clipping; names are Megatron's."""

    name: str = key(
        "adamw",
        "Update rule: adamw, sgd, lion, adafactor, muon, or `module:factory` for one from another "
        "package.",
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
    decoupled_lr: float | None = key(
        None, "Largest learning rate of word embedding and output layer; null: lr.", ge=0
    )
    decoupled_min_lr: float | None = key(
        None, "Smallest one, only with decoupled_lr; null: min_lr.", ge=0
    )
    override_opt_param_scheduler: bool = key(
        False, "When resuming with another learning-rate plan, use the new one from there on."
    )
    weight_decay: float = key(
        0.1,
        "Decoupled decay, multiplied by the learning rate (sgd: L2 term); not on biases and "
        "vectors.",
        ge=0,
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = key(
        "constant", "Growth of the weight decay over train.steps."
    )
    start_weight_decay: float | None = key(
        None, "Weight decay of the first step; required when it grows.", ge=0
    )
    end_weight_decay: float | None = key(
        None, "Weight decay of the last step; required when it grows.", ge=0
    )
    apply_wd_to_qk_layernorm: bool = key(
        False, "Decay the weights of the norms of query and key (qk_layernorm) as well."
    )
    adam_beta1: float = key(0.9, "Decay of Adam's first moment.", ge=0, lt=1)
    adam_beta2: float = key(0.95, "Decay of Adam's second moment.", ge=0, lt=1)
    adam_eps: float = key(1.0e-8, "Added to the root of Adam's second moment.", gt=0)
    exp_avg_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "Type in which adamw stores its first moment."
    )
    offload: bool = key(
        False,
        "Keep moments in pinned host memory between updates: less GPU memory during forward and "
        "backward passes, a slower update.",
    )
    sgd_momentum: float = key(0.9, "Momentum of sgd; 0: none.", ge=0, lt=1)
    lion_beta1: float = key(0.9, "Share of Lion's momentum in its update.", ge=0, lt=1)
    lion_beta2: float = key(0.99, "Decay of Lion's momentum.", ge=0, lt=1)
    adafactor_decay_rate: float = key(
        0.8, "Adafactor's second moment decays with 1 - step^-rate.", gt=0, le=1
    )
    adafactor_clip_threshold: float = key(
        1.0, "Largest RMS of Adafactor's update of a matrix.", ge=1
    )
    adafactor_scale_parameter: bool = key(
        True, "Adafactor's lr is relative to the RMS of each weight."
    )
    adafactor_min_dim_size_to_factor: int = key(
        128, "Matrices with a smaller side keep a full second moment in Adafactor.", ge=1
    )
    muon_momentum: float = key(0.95, "Decay of Muon's momentum.", ge=0, lt=1)
    muon_nesterov: bool = key(False, "Nesterov momentum in Muon.")
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = key(
        "spectral", "Scale of Muon's update by the shape of a matrix."
    )
    muon_extra_scale_factor: float = key(
        1.0, "Further factor of Muon's update; about 0.2 with spectral takes Adam's lr.", gt=0
    )
    muon_num_ns_steps: int = key(5, "Newton-Schulz steps of Muon.", ge=1)
    muon_coefficient_type: Literal["quintic", "simple"] = key(
        "quintic", "Coefficients of the Newton-Schulz steps."
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = key(
        "medium", "Products of the Newton-Schulz steps: bfloat16, TF32 or fp32."
    )
    clip_grad: float = key(1.0, "Largest global norm of the gradient; 0: no clipping.", ge=0)
    grad_norm_skip_threshold: float | None = key(
        None, "Skip the update of a step whose gradient norm is above it or not finite.", gt=0
    )
