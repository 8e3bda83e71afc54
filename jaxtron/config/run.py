"""Configuration of a run: how long, how large a batch, how often to evaluate."""

from typing import Literal, get_args

from jaxtron.config.fields import key, section
from jaxtron.errors import ConfigError
from jaxtron.layers.activation_names import ACTIVATION_NAMES
from jaxtron.nearest import nearest

RecomputeAction = Literal["save", "recompute", "offload"]
Recompute = Literal["none", "selective", "full"] | dict[str, str]
"""A policy, or ``{name: RecomputeAction}`` for some of ``ACTIVATION_NAMES``."""
RecomputeMethod = Literal["uniform", "block"]


@section
class TrainConfig:
    """Length of the run and the cut of the global batch."""

    steps: int = key(help="Optimizer steps of the whole run.", ge=0)
    global_batch_size: int = key(help="Sequences per optimizer step.", ge=1)
    rampup_batch_size: list[int] | None = key(
        None,
        "[start, increment, samples]: the batch grows from `start` rows to global_batch_size in "
        "steps of `increment`, spread over the first `samples` samples. Plans of learning rate and "
        "weight decay then count global_batch_size samples as one step.",
    )
    micro_batch_size: int | None = key(
        None, "Sequences per data shard and microbatch; null: from num_microbatches, else 1.", ge=1
    )
    num_microbatches: int | None = key(
        None, "Microbatches per step; give this or micro_batch_size.", ge=1
    )
    microbatches_at_once: int = key(
        1,
        "Microbatches computed side by side, so that collectives of one (of tensor, context and "
        "expert parallelism) can run beside the products of another. Memory holds the activations "
        "of all of them.",
        ge=1,
    )
    seed: int = key(1234, "Seed of initial weights, data order and dropout.", ge=0)
    layer_loop: Literal["auto", "scan", "unroll"] = key(
        "auto",
        "Loop over layers: scan compiles fast, unroll runs faster on GPUs (auto: unroll on GPUs, "
        "unless `recompute` offloads, which needs a scan there).",
    )
    recompute: Recompute = key(
        "none",
        "Activations computed again in the backward pass: none; selective (attention's core); full "
        "(each layer keeps its input only); or a mapping {name: save | recompute | offload}, where "
        "offload keeps the activation in pinned host memory. With a mapping, names it does not "
        "list are saved and values without a name (inside of norms, activation functions and "
        "attention, dropout masks) are computed again from the nearest saved ones. Names: "
        + ", ".join(ACTIVATION_NAMES)
        + ".",
    )
    recompute_method: RecomputeMethod | None = key(
        None,
        "Form of recompute: full. uniform: groups of recompute_num_layers layers are recomputed "
        "together and keep the group's input only; block: the first recompute_num_layers layers "
        "keep their input only, the others everything; null: every layer by itself.",
    )
    recompute_num_layers: int | None = key(
        None, "Layers of a group (uniform) or layers recomputed (block).", ge=1
    )
    exit_duration_min: float | None = key(
        None, "Checkpoint and stop cleanly after this long [minutes].", gt=0
    )
    exit_interval: int | None = key(
        None,
        "Checkpoint and stop after a step divisible by this (the LR plan keeps `steps`).",
        ge=1,
    )

    exit_signal_handler: bool = key(
        True,
        "On SIGTERM or SIGUSR1 checkpoint and stop, with status 128 + the signal's number; needs "
        "checkpoint.dir, without which the signals do what they do to any process.",
    )

    def __post_init__(self) -> None:
        """Refuse names that do not exist and a ramp that does not reach its end."""
        self._check_ramp()
        if not isinstance(self.recompute, dict):
            return
        actions = get_args(RecomputeAction)
        problems = [
            f"train.recompute.{name}: no such activation; {nearest(name, ACTIVATION_NAMES)}"
            for name in self.recompute
            if name not in ACTIVATION_NAMES
        ] + [
            f"train.recompute.{name} is {action!r}: expected one of {', '.join(actions)}"
            for name, action in self.recompute.items()
            if action not in actions
        ]
        if problems:
            raise ConfigError("\n".join(problems))

    def _check_ramp(self) -> None:
        ramp, final = self.rampup_batch_size, self.global_batch_size
        if ramp is None:
            return
        if len(ramp) != 3 or min(ramp) < 1:
            raise ConfigError(
                f"train.rampup_batch_size is {ramp}: expected three numbers of 1 or more, "
                "[start, increment, samples]"
            )
        start, increment, _ = ramp
        if start > final or (final - start) % increment:
            raise ConfigError(
                f"train.rampup_batch_size starts at {start} and grows by {increment}, which does "
                f"not arrive at train.global_batch_size {final}: choose an increment that divides "
                f"{final} - {start}"
            )
        if self.num_microbatches is not None:
            raise ConfigError(
                f"train.num_microbatches is {self.num_microbatches}, but under "
                "train.rampup_batch_size the number grows with the batch: give "
                "train.micro_batch_size instead"
            )


@section
class EvalConfig:
    """Evaluation on the validation split during training."""

    interval: int = key(0, "Steps between evaluations; 0: never.", ge=0)
    iters: int = key(
        0, "Global batches per evaluation; required with interval, or full_validation.", ge=0
    )
    full_validation: bool = key(
        False,
        "Evaluate every token of the validation sets once, in place of `iters` batches; weights of "
        "a blend then choose its sets (0: left out) and no shares.",
    )
    test: bool = key(
        False,
        "Evaluate the test set (data.test_paths, or the third share of data.split) too, once, with "
        "the evaluation after the last step; reported as test_loss.",
    )

    def __post_init__(self) -> None:
        """Refuse two answers to how much is evaluated, or none."""
        if self.full_validation and self.iters:
            raise ConfigError(
                f"eval.full_validation is true, so eval.iters ({self.iters}) has no effect: set "
                "eval.iters to 0 to evaluate everything, or eval.full_validation to false"
            )
        if self.test and not self.enabled:
            raise ConfigError(
                "eval.test is true, but the run never evaluates: set eval.interval, and eval.iters "
                "or eval.full_validation, or eval.test to false"
            )

    @property
    def enabled(self) -> bool:
        """Whether the run evaluates at all."""
        return self.interval > 0 and (self.iters > 0 or self.full_validation)


@section
class LossConfig:
    """The training objective."""

    reduction: Literal["token", "microbatch"] = key(
        "token", "Mean over all valid tokens of the step, or Megatron's mean of microbatch means."
    )
    z_loss_coeff: float = key(0.0, "Weight of the squared log-partition term.", ge=0)
    chunk_tokens: int | None = key(
        None,
        "Tokens whose logits exist at a time on a device; null: chosen from the vocabulary.",
        ge=1,
    )
