"""The compiled training program: a model on a mesh, its state, and the functions that advance it.

This is the public way to train without the Trainer (``scripts/custom_loop.py``)::

    program = Program(load_config("configs/tiny.yaml"))
    state = program.init_state()
    state, metrics = program.train_step(state, program.place(rows))
"""

import copy
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtron.config.batch import batch_layout
from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.config import Config
from jaxtron.config.validate import validate_for_training
from jaxtron.errors import ConfigError
from jaxtron.evaluation import eval_step, next_token_logits
from jaxtron.kernels.attention import choose_backend
from jaxtron.kernels.attention_spec import AttentionSpec
from jaxtron.launch.xla_flags import (
    compiler_options,
    copies_permutations,
    step_flags,
    words,
)
from jaxtron.layers.layer_loop import unrolls
from jaxtron.layers.moe.layer import check_experts
from jaxtron.log_once import log_once
from jaxtron.mesh.axes import AXES, resolve_axes
from jaxtron.mesh.mesh import make_mesh
from jaxtron.mesh.rules import make_rules
from jaxtron.models.ahead import PredictsAhead, ahead_of
from jaxtron.models.architectures import ARCHITECTURES
from jaxtron.models.model import Model
from jaxtron.objective import Objective
from jaxtron.parallel.batch import batch_placement
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.layout import context_layout
from jaxtron.parallel.microbatches import GradientPlan, Sequential
from jaxtron.parallel.overlap import plan_overlap
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.pipeline.executor import Pipelined
from jaxtron.parallel.pipeline.layout import place_layers
from jaxtron.parallel.pipeline.registry import make_schedule
from jaxtron.parallel.pipeline.stack_order import StackOrder, stack_order
from jaxtron.parallel.pipeline.state_order import StateOrder
from jaxtron.parallel.reduction import plan_reduction
from jaxtron.parallel.region import Region
from jaxtron.parallel.state_sharding import with_shardings
from jaxtron.parallel.step_kinds import step_kinds
from jaxtron.parallel.tensor_parts import works_on_parts
from jaxtron.precision.dtypes import DTYPES
from jaxtron.precision.fp8_delayed import Scales
from jaxtron.precision.fp8_layers import has_layer_exceptions
from jaxtron.precision.fp8_setup import make_fp8_plan
from jaxtron.room import program_bytes
from jaxtron.state_plan import State, plan_state
from jaxtron.update import apply_gradients

logger = logging.getLogger(__name__)


class Program:
    """A model, its mesh, and compiled functions over its state.

    The state is a dict of global arrays: ``params``, ``opt_state``, ``step`` (steps done, int32)
    and ``updates`` (optimizer updates applied; a step without a valid token applies none,
    nor one over ``optimizer.grad_norm_skip_threshold``, nor one that overflows under fp16), under
    fp16 ``loss_scale`` (:mod:`jaxtron.precision.loss_scale`), and with the FP8 recipe delayed
    ``fp8`` (:mod:`jaxtron.precision.fp8_delayed`). On a pipeline its stacked
    layers are in the order of the stages; :meth:`to_logical` and :meth:`from_logical` convert to
    the model's order, which checkpoints have.

    Args:
        config: the configuration; refused before anything is compiled when it cannot work.
        devices: devices to use; default: all of the job.
        model: a model of your own (``docs/extending.md``); default: the decoder that ``config``
            describes. Vocabulary, heads and dropout rates are read from ``config.model`` either
            way.

    Raises:
        ConfigError: a combination that cannot work, with the fix.
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device] | None = None,
        model: Model | None = None,
    ) -> None:
        devices = list(jax.devices() if devices is None else devices)
        self.config = config
        self.sizes = resolve_axes(config.parallel, len(devices))
        validate_for_training(config, len(devices))
        self.mesh = make_mesh(self.sizes, devices)
        self.rules = make_rules(config.parallel.rules, self.sizes)
        build = ARCHITECTURES[config.model.architecture]
        self.model: Model = build(config.model) if model is None else model
        if config.model.mtp_num_layers and not isinstance(self.model, PredictsAhead):
            raise ConfigError(
                f"model.mtp_num_layers is {config.model.mtp_num_layers}, but this model has no "
                "predict_ahead: give it that method, or set model.mtp_num_layers to null"
            )
        self.batch_layout = batch_layout(config, self.sizes)
        self.batch_schedule = batch_schedule(config.train)
        ramp = config.train.rampup_batch_size is not None
        self.platform = platform = devices[0].platform
        parallel, precision = config.parallel, config.precision
        fp8_experts = precision.fp8 is not None and precision.fp8_experts
        compute = jnp.dtype(DTYPES[precision.compute])
        check_experts(config.model, self.rules, compute, fp8_experts, platform)
        differ = has_layer_exceptions(precision)
        unroll = unrolls(config.train, platform, layers_differ=differ)
        sequence_parallel = parallel.sequence_parallel
        if sequence_parallel is None:
            sequence_parallel = self.sizes["tensor"] > 1
        compiler = (
            getattr(devices[0], "compute_capability", None),
            jax.__version__,
            os.environ.get("XLA_FLAGS", ""),
        )
        in_parts = works_on_parts(
            parallel,
            self.mesh,
            sequence_parallel=sequence_parallel,
            copies=copies_permutations(*compiler),
        )
        self.region = Region(self.sizes, sequence_parallel, in_parts)
        placement = place_layers(
            config.model.stacked_blocks,
            self.sizes["pipeline"],
            parallel.virtual_pipeline,
            parallel.pipeline_layout,
        )
        self.order: StackOrder = stack_order(placement)
        shapes = self.order.place(self.model.shapes)
        self.layouts = param_layouts(
            shapes,
            self.model.logical,
            self.rules,
            parallel.data_sharding,
            DTYPES[precision.compute],
        )
        reduction = plan_reduction(
            parallel,
            precision,
            self.mesh,
            self.rules.axes("zero"),
            microbatches=self.batch_layout.num_microbatches if not ramp else None,
        )
        kinds = step_kinds(
            config, self.mesh, placement, exchange=reduction.exchange, in_parts=in_parts
        )
        self.step_flags = step_flags(*compiler, kinds)
        if self.step_flags:
            log_once(logger, f"the step is compiled with {' '.join(words(self.step_flags))}")
        self.plan = GradientPlan(
            layouts=self.layouts,
            region=self.region,
            data_sharding=parallel.data_sharding,
            reduction=reduction,
            accumulate_dtype=DTYPES[precision.grads],
            unroll=unroll,
            fp8=make_fp8_plan(
                precision,
                products=getattr(self.model, "products", None),
                layouts=self.layouts["layers"],
                num_layers=config.model.stacked_blocks,
                rules=self.rules,
                region=self.region,
                gathers_in_layer=parallel.data_sharding == "optim_grads_params",
                reduction=reduction,
                tokens=config.train.global_batch_size * config.data.seq_length,
                device=devices[0],
            ),
            sums_itself=tuple(getattr(self.model, "sums_itself", ())),
        )
        self.executor: Sequential | Pipelined = Sequential(
            self.plan,
            config.train.microbatches_at_once,
            plan_overlap(parallel, self.sizes, unroll=unroll, platform=platform),
        )
        if self.sizes["pipeline"] > 1:
            schedule = functools.partial(
                make_schedule,
                parallel.pipeline_schedule,
                self.sizes["pipeline"],
                parallel.virtual_pipeline,
            )
            self.executor = Pipelined(self.plan, schedule, placement)
        self._set_rows(
            self.sizes["context"],
            config.data.seq_length,
            self.batch_layout.num_microbatches,
            self.batch_layout.rows_per_microbatch,
        )
        self.specs = jax.tree.map(lambda lay: lay.stored_spec, self.layouts, is_leaf=is_layout)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.state_plan = plan_state(
            config,
            self.mesh,
            layouts=self.layouts,
            shapes=shapes,
            logical=self.model.logical,
            delayed=None if self.plan.fp8 is None else self.plan.fp8.delayed,
        )
        self.optimizer, self.rates = self.state_plan.optimizer, self.state_plan.rates
        self.scaler, self.delayed = self.state_plan.scaler, self.state_plan.delayed
        self.state_shardings = self.state_plan.shardings
        self.streamed_update = self.state_plan.streamed_update
        self._order = StateOrder(self.order, self.mesh, self.state_shardings)
        self.train_step = jax.jit(
            self._train_step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, self.replicated),
            compiler_options=compiler_options(self.step_flags),
        )
        self.eval_step = jax.jit(functools.partial(eval_step, self), out_shardings=self.replicated)
        self.next_token_logits = jax.jit(
            functools.partial(next_token_logits, self), out_shardings=self.replicated
        )

    def _set_rows(self, degree: int, length: int, microbatches: int, rows: int) -> None:
        """Decide how rows of ``length`` tokens lie on the devices and which kernel attends."""
        config, sizes = self.config, self.sizes
        cut = context_layout(config.parallel, sizes["context"], degree)
        gather = config.parallel.context_strategy == "all_gather"
        self.context = ContextAttention(cut, gather, config.parallel.context_cut_documents)
        heads_split = self.rules.size("heads") * cut.all_to_all
        self.attention_backend = choose_backend(
            config.model.attention_backend,
            AttentionSpec(
                query_length=length // cut.chunks,
                key_length=length // cut.chunks,
                num_heads=config.model.num_attention_heads // heads_split,
                num_query_groups=max(1, config.model.query_groups // heads_split),
                head_dim=config.model.head_dim,
                dtype=jnp.dtype(DTYPES[config.precision.compute]),
                causal=True,
                window=config.model.window_size,
                segments=config.data.reset_attention_mask,
                dropout=config.model.attention_dropout > 0,
                deterministic=config.runtime.deterministic,
                blocks=cut.ring > 1,
            ),
            self.platform,
        )
        self.placement = batch_placement(self.mesh, self.rules, microbatches, rows, self.context)
        self.objective = Objective(
            config=config,
            model=self.model,
            plan=self.plan,
            region=self.region,
            rules=self.rules,
            context=self.context,
            attention_backend=self.attention_backend,
            seq_length=length,
            rows_per_microbatch=self.placement.rows_per_microbatch,
            platform=self.platform,
        )

    def with_rows(self, degree: int, length: int, microbatches: int) -> "Program":
        """The same model and state with other rows, for :meth:`add_gradients` and :meth:`place`.

        Args:
            degree: devices of the context axis that share a row.
            length: tokens of a row.
            microbatches: of a batch; each has a row for every group of ``degree`` devices.
        """
        other = copy.copy(self)
        other._set_rows(degree, length, microbatches, self.batch_layout.data_shards)
        return other

    # -- state ---------------------------------------------------------------------------------

    def _init_state(self, seed: jax.Array | int) -> State:
        params = self.place_params(self.model.init(jax.random.key(seed)))
        return self.state_plan.initial(params) | self.init_scales()

    def init_scales(self) -> State:
        """The entries of an initial state that its precision asks for (traceable)."""
        scales: State = {}
        if self.scaler is not None:
            scales["loss_scale"] = self.scaler.init()
        if self.delayed is not None:
            scales |= self._order.place({"fp8": self.delayed.init()})
        return scales

    def init_state(self) -> State:
        """Initial state from ``train.seed``: bitwise the same on every mesh."""
        init = jax.jit(self._init_state, out_shardings=self.state_shardings)
        return init(self.config.train.seed)

    def placed_state(self) -> State:
        """Shapes, dtypes and shardings of the state as the devices hold it."""
        return with_shardings(jax.eval_shape(self._init_state, 0), self.state_shardings)

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state, layers in logical order, as checkpoints have.

        What is restored into it goes through :meth:`from_logical`.
        """
        placed = self.placed_state()
        return with_shardings(self.order.logical(placed), self._order.logical_shardings(placed))

    def step_bytes(self, state: State, batch: Mapping[str, jax.Array]) -> int:
        """Compile the training step; bytes that it allocates on a device besides its arguments."""
        return program_bytes(self.train_step.lower(state, batch).compile())

    def to_logical(self, state: State) -> State:
        """The state, or some of its entries, with the layers in the model's order.

        The same arrays when the order is the same (no pipeline, or one chunk a stage and an even
        placement), else new ones.
        """
        return self._order.to_logical(state)

    def from_logical(self, state: State) -> State:
        """The inverse of :meth:`to_logical`; ``state`` may not be used afterwards."""
        return self._order.from_logical(state)

    def place_params(self, params: Any) -> Any:
        """Parameters from logical to placed order; traceable."""
        return self._order.place({"params": params})["params"]

    # -- batches -------------------------------------------------------------------------------

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put this process's rows (``self.placement.rows``) of a global batch on its devices."""
        return self.placement.place(batch)

    # -- the step ------------------------------------------------------------------------------

    def manual(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """``function`` over local views: every collective in it is its own."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _loss_and_gradients(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        step: jax.Array,
        scale: jax.Array,
        share: Mapping[str, jax.Array],
        fp8_scales: Scales | None,
    ) -> Any:
        """Local view: loss and token count (alike everywhere), gradients as stored shards.

        Loss and gradients are ``scale`` times what they are. The tokens' weights carry the factor,
        because the output layer's gradients are computed, and rounded, with its loss. ``share`` is
        of :meth:`add_gradients`; empty for a whole step. ``fp8_scales`` are of this stage's layers.
        """
        objective = self.objective
        trained, live = share.get("trained"), share.get("live")
        microbatches: dict[str, Any] = {
            **{name: array for name, array in batch.items() if name != "document_length"},
            "token_weights": scale * objective.token_weights(batch["loss_mask"], trained),
            "router_weights": scale * objective.token_weights(objective.live(batch), live),
            "rows": objective.global_rows(*batch["tokens"].shape[:2]) + share.get("first_row", 0),
        }
        some = {"count": share["count"]} if share else {}
        depths = self.config.model.mtp_num_layers
        if depths is not None:
            microbatches["ahead"] = ahead_of(dict(batch), self.context, depths)
            for entry in microbatches["ahead"]:
                entry["token_weights"] = scale * objective.token_weights(entry.pop("loss_mask"))
        (loss, report), grads, measured = self.executor.value_and_gradients(
            objective.computation(step), params, microbatches, scales=fp8_scales, **some
        )
        loss, ahead = (loss, []) if depths is None else loss
        ahead = jax.tree.map(lambda a: self.region.sum(a, AXES), ahead)
        axes = [axis for axis in AXES if axis != "pipeline"]
        report = jax.tree.map(lambda a: self.region.sum(a, axes), report)
        tokens, work = objective.count(batch["loss_mask"]), objective.attention_work(batch)
        return self.region.sum(loss, AXES), tokens, grads, report, work, ahead, measured

    def loss_and_gradients(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        step: jax.Array | int = 0,
        loss_scale: jax.Array | float = 1.0,
    ) -> Any:
        """Loss, number of valid tokens, and gradients of a global batch (traceable).

        ``step`` is the number of steps done; dropout depends on it. The backward pass computes
        ``loss_scale`` times the gradients; what is returned is divided by it again. FP8 scales are
        of the tensors themselves, whatever the recipe.
        """
        return self._with_report(params, batch, step, loss_scale)[:3]

    def _with_report(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        step: jax.Array | int,
        loss_scale: jax.Array | float,
        share: Mapping[str, jax.Array] | None = None,
        fp8_scales: Scales | None = None,
    ) -> Any:
        """:meth:`loss_and_gradients`, and what the layers report, stacked in their places.

        After that what a step's operations are counted from, where rows are packed; a list of the
        reports of the depths of multi-token prediction; and given ``fp8_scales``, the largest
        magnitudes that were met in their place.
        """
        batch_specs = jax.tree.map(lambda _: self.placement.sharding.spec, dict(batch))
        function = self.manual(
            self._loss_and_gradients,
            (self.specs, batch_specs, *[PartitionSpec()] * 3, PartitionSpec("pipeline")),
            (
                *[PartitionSpec()] * 2,
                self.specs,
                PartitionSpec("pipeline"),
                *[PartitionSpec()] * 2,
                PartitionSpec("pipeline"),
            ),
        )
        scale = jnp.asarray(loss_scale, jnp.float32)
        loss, tokens, grads, report, work, ahead, measured = function(
            params, dict(batch), jnp.asarray(step, jnp.int32), scale, dict(share or {}), fp8_scales
        )
        if isinstance(loss_scale, float) and loss_scale == 1.0:
            return loss, tokens, grads, report, work, ahead, measured
        if self.config.model.num_experts is not None:
            report = {**report, "loss": report["loss"] / scale}
        for entry in ahead:
            entry["loss"] /= scale
            if entry["layer"]:
                entry["layer"]["loss"] /= scale
        grads = jax.tree.map(lambda g: g / scale, grads)
        return loss / scale, tokens, grads, report, work, ahead, measured

    def loss_scale(self, state: State) -> jax.Array | float:
        """Factor on a step's loss; 1 unless it is computed in fp16."""
        return 1.0 if self.scaler is None else state["loss_scale"]["scale"]

    def fp8_scales(self, state: State) -> Scales | None:
        """Given scales of a step's FP8 tensors; None: they come from the tensors themselves."""
        return None if self.delayed is None else self.delayed.scales(state["fp8"])

    def add_gradients(
        self,
        state: State,
        total: Any,
        batch: Mapping[str, jax.Array],
        share: Mapping[str, jax.Array],
    ) -> Any:
        """Loss, tokens, gradients and reports of a part of a step, added to ``total`` (traceable).

        Gradients are stored shards, summed over all devices: they have the parameters' shardings
        whatever the rows, so that ``total`` goes from one executable to the next, and at last to
        :func:`jaxtron.update.apply_gradients`.

        Args:
            state: read alone.
            total: what this function returned for the parts before.
            batch: microbatches of :meth:`place`.
            share: int32 scalars: ``trained`` and ``live`` tokens of the whole step, ``first_row``
                (rows of the parts before) and ``count`` of microbatches to compute.
        """
        scale = self.loss_scale(state)
        *part, largest = self._with_report(
            state["params"], batch, state["step"], scale, share, self.fp8_scales(state)
        )
        *sums, before = total
        return (*jax.tree.map(jnp.add, sums, part), jax.tree.map(jnp.maximum, before, largest))

    def _train_step(self, state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Any]:
        scale = self.loss_scale(state)
        total = self._with_report(
            state["params"], batch, state["step"], scale, fp8_scales=self.fp8_scales(state)
        )
        return apply_gradients(self, state, total)
