"""The compiled training program: a model on a mesh, its state, and the functions that advance it.

This is the public way to train without the Trainer (``scripts/custom_loop.py``)::

    program = Program(load_config("configs/tiny.yaml"))
    state = program.init_state()
    state, metrics = program.train_step(state, program.place(rows))
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtron.config.batch import batch_layout
from jaxtron.config.batch_schedule import batch_schedule
from jaxtron.config.config import Config
from jaxtron.config.validate import validate_for_training
from jaxtron.kernels.attention import choose_backend
from jaxtron.kernels.attention_spec import AttentionSpec
from jaxtron.layers.cross_entropy import CrossEntropy
from jaxtron.layers.inputs import Randomness
from jaxtron.layers.remat import Remat
from jaxtron.mesh.axes import AXES, resolve_axes
from jaxtron.mesh.mesh import make_mesh
from jaxtron.mesh.rules import make_rules
from jaxtron.models.decoder import Decoder
from jaxtron.models.model import Model
from jaxtron.optim.clip import clip_by_global_norm
from jaxtron.optim.optimizer import make_optimizer
from jaxtron.optim.schedule import learning_rate_schedule
from jaxtron.parallel.batch import batch_placement
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.context.layout import context_layout
from jaxtron.parallel.microbatches import GradientPlan
from jaxtron.parallel.param_layout import is_layout, param_layouts
from jaxtron.parallel.region import Region
from jaxtron.parallel.state_sharding import moments_on_host, optimizer_state_shardings
from jaxtron.precision.fp8_layers import has_layer_exceptions
from jaxtron.precision.fp8_setup import make_fp8_plan
from jaxtron.precision.loss_scale import loss_scaler

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
State = dict[str, Any]


class Program:
    """A model, its mesh, and compiled functions over its state.

    The state is a dict of global arrays: ``params``, ``opt_state``, ``step`` (steps done, int32)
    and ``updates`` (optimizer updates applied; a step without a valid token applies none,
    nor one over ``optimizer.grad_norm_skip_threshold``, nor one that overflows under fp16), and
    under fp16 ``loss_scale`` (:mod:`jaxtron.precision.loss_scale`).

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
        self.model: Model = Decoder(config.model) if model is None else model
        self.batch_layout = batch_layout(config, self.sizes)
        platform = devices[0].platform
        loop = config.train.layer_loop
        parallel, precision = config.parallel, config.precision
        differ = has_layer_exceptions(precision)
        unroll = loop == "unroll" or (loop == "auto" and (platform != "cpu" or differ))
        sequence_parallel = parallel.sequence_parallel
        if sequence_parallel is None:
            sequence_parallel = self.sizes["tensor"] > 1
        self.region = Region(self.sizes, sequence_parallel)
        self.layouts = param_layouts(
            self.model.shapes,
            self.model.logical,
            self.rules,
            parallel.data_sharding,
            DTYPES[precision.compute],
        )
        self.plan = GradientPlan(
            layouts=self.layouts,
            region=self.region,
            data_sharding=parallel.data_sharding,
            reduce_dtype=DTYPES[precision.grad_reduce],
            unroll=unroll,
            fp8=make_fp8_plan(
                precision,
                products=getattr(self.model, "products", None),
                layouts=self.layouts["layers"],
                num_layers=config.model.num_layers,
                rules=self.rules,
                region=self.region,
                gathers_in_layer=parallel.data_sharding == "optim_grads_params",
                reduce_dtype=DTYPES[precision.grad_reduce],
                device=devices[0],
            ),
        )
        cut = context_layout(parallel, self.sizes["context"])
        self.context = ContextAttention(cut, gather=parallel.context_strategy == "all_gather")
        heads_split = self.rules.size("heads") * cut.all_to_all
        self.attention_backend = choose_backend(
            config.model.attention_backend,
            AttentionSpec(
                query_length=config.data.seq_length // cut.chunks,
                key_length=config.data.seq_length // cut.chunks,
                num_heads=config.model.num_attention_heads // heads_split,
                num_query_groups=max(1, config.model.query_groups // heads_split),
                head_dim=config.model.head_dim,
                dtype=jnp.dtype(DTYPES[precision.compute]),
                causal=True,
                window=config.model.window_size,
                segments=config.data.reset_attention_mask,
                dropout=config.model.attention_dropout > 0,
                blocks=cut.ring > 1,
            ),
            platform,
        )
        self.batch_schedule = batch_schedule(config.train)
        plan_length = self.batch_schedule.plan_length(config.train.steps)
        ramp = config.train.rampup_batch_size is not None
        position = self.batch_schedule.full_batches if ramp else None
        self.optimizer = make_optimizer(
            config.optimizer,
            total_steps=plan_length,
            logical_axes=self.model.logical,
            position=position,
        )
        self.schedule = learning_rate_schedule(
            config.optimizer, total_steps=plan_length, position=position
        )
        self.specs = jax.tree.map(lambda lay: lay.stored_spec, self.layouts, is_leaf=is_layout)
        param_shardings = jax.tree.map(
            lambda lay: NamedSharding(self.mesh, lay.stored_spec), self.layouts, is_leaf=is_layout
        )
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        abstract_opt = jax.eval_shape(self.optimizer.init, self.model.shapes)
        self._opt_shardings = optimizer_state_shardings(
            abstract_opt, self.model.shapes, param_shardings
        )
        self.state_shardings: State = {
            "params": param_shardings,
            "opt_state": self._opt_shardings,
            "step": self.replicated,
            "updates": self.replicated,
        }
        if config.optimizer.offload:
            self.state_shardings["opt_state"] = moments_on_host(abstract_opt, self._opt_shardings)
        self.scaler = loss_scaler(precision)
        if self.scaler is not None:
            self.state_shardings["loss_scale"] = jax.tree.map(
                lambda _: self.replicated, self.scaler.init()
            )
        self.placement = batch_placement(
            self.mesh,
            self.rules,
            self.batch_layout.num_microbatches,
            self.batch_layout.rows_per_microbatch,
            self.context,
        )
        self.train_step = jax.jit(
            self._train_step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, self.replicated),
        )
        self.eval_step = jax.jit(self._eval_step, out_shardings=self.replicated)
        self.next_token_logits = jax.jit(self._next_token_logits, out_shardings=self.replicated)

    # -- state ---------------------------------------------------------------------------------

    def _init_state(self, seed: jax.Array) -> State:
        params = self.model.init(jax.random.key(seed))
        zero = jnp.zeros((), jnp.int32)
        state = {
            "params": params,
            "opt_state": self.optimizer.init(params),
            "step": zero,
            "updates": zero,
        }
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.init()
        return state

    def init_state(self) -> State:
        """Initial state from ``train.seed``: bitwise the same on every mesh."""
        init = jax.jit(self._init_state, out_shardings=self.state_shardings)
        return init(self.config.train.seed)

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state, for restoring a checkpoint."""
        shapes = jax.eval_shape(self._init_state, 0)
        return jax.tree.map(
            lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh),
            shapes,
            self.state_shardings,
        )

    # -- batches -------------------------------------------------------------------------------

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put this process's rows (``self.placement.rows``) of a global batch on its devices."""
        return self.placement.place(batch)

    # -- the step ------------------------------------------------------------------------------

    def _manual(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _hidden(
        self, copies: Any, batch: Mapping[str, jax.Array], step: jax.Array | None = None
    ) -> jax.Array:
        """Final hidden states; ``step`` turns dropout on."""
        config, tokens = self.config, batch["tokens"]
        length = tokens.shape[1] * self.sizes["context"]
        own_positions = self.context.own_positions(length)
        randomness = None
        if step is not None and (config.model.hidden_dropout or config.model.attention_dropout):
            randomness = Randomness(
                config=config.model,
                region=self.region,
                seed=config.train.seed,
                step=step,
                rows=batch["rows"],
                positions=own_positions,
            )
        attend = self.context.attend(
            length,
            scale=1 / math.sqrt(config.model.head_dim),
            window=config.model.window_size,
            segment_ids=batch.get("segment_ids"),
            backend=self.attention_backend,
        )
        return self.model.hidden(
            copies,
            self.plan.fetch,
            tokens,
            batch.get("position_ids", own_positions),
            self.region,
            attend,
            randomness=randomness,
            remat=Remat(
                config.train.recompute,
                config.train.recompute_method,
                config.train.recompute_num_layers,
                self.plan.gathers_in_layer and config.parallel.reshard_after_forward,
            ),
        )

    def _objective(
        self, copies: Any, batch: Mapping[str, jax.Array], step: jax.Array | None = None
    ) -> Any:
        """Pieces of one microbatch's objective and plain loss."""
        x = self._hidden(copies, batch, step)
        cross_entropy = CrossEntropy(
            region=self.region,
            vocab_size=self.config.model.vocab_size,
            z_loss_coeff=self.config.loss.z_loss_coeff,
            chunk_tokens=self.config.loss.chunk_tokens,
            logits_dtype=DTYPES[self.config.precision.logits],
        )
        return cross_entropy(
            x.reshape(-1, x.shape[-1]),
            self.model.output_weight(copies, self.plan.fetch),
            batch["labels"].reshape(-1),
            batch["token_weights"].reshape(-1),
        )

    def _batch_axes(self) -> tuple[str, ...]:
        return (*self.rules.axes("batch"), *self.rules.axes("sequence"))

    def _token_weights(self, loss_mask: jax.Array) -> jax.Array:
        """Weight of every token ``[microbatch, row, seq]`` in the objective."""
        axes = self._batch_axes()
        if self.config.loss.reduction == "token":
            return loss_mask / jnp.maximum(self.region.sum(jnp.sum(loss_mask), axes), 1)
        totals = self.region.sum(jnp.sum(loss_mask, axis=(1, 2), keepdims=True), axes)
        return loss_mask / (jnp.maximum(totals, 1) * loss_mask.shape[0])

    def _count(self, loss_mask: jax.Array) -> jax.Array:
        return self.region.sum(jnp.sum(loss_mask > 0, dtype=jnp.int32), self._batch_axes())

    def _global_rows(self, microbatches: int, rows: int) -> jax.Array:
        """Rows of the global batch ``[microbatch, row]`` that this device holds."""
        shard: jax.Array | int = 0
        for axis in self.rules.axes("batch"):
            shard = shard * self.sizes[axis] + lax.axis_index(axis)
        first = jnp.arange(microbatches, dtype=jnp.int32) * self.placement.rows_per_microbatch
        return first[:, None] + shard * rows + jnp.arange(rows, dtype=jnp.int32)

    def _loss_and_gradients(
        self, params: Any, batch: Mapping[str, jax.Array], step: jax.Array, scale: jax.Array
    ) -> Any:
        """Local view: loss and token count (alike everywhere), gradients as stored shards.

        Loss and gradients are ``scale`` times what they are. The tokens' weights carry the factor,
        because the output layer's gradients are computed, and rounded, with its loss.
        """
        microbatches = {
            **batch,
            "token_weights": scale * self._token_weights(batch["loss_mask"]),
            "rows": self._global_rows(*batch["tokens"].shape[:2]),
        }
        objective = functools.partial(self._objective, step=step)
        loss, grads = self.plan.value_and_gradients(objective, params, microbatches)
        return self.region.sum(loss, AXES), self._count(batch["loss_mask"]), grads

    def loss_and_gradients(
        self,
        params: Any,
        batch: Mapping[str, jax.Array],
        step: jax.Array | int = 0,
        loss_scale: jax.Array | float = 1.0,
    ) -> Any:
        """Loss, number of valid tokens, and gradients of a global batch (traceable).

        ``step`` is the number of steps done; dropout depends on it. The backward pass computes
        ``loss_scale`` times the gradients; what is returned is divided by it again.
        """
        batch_specs = jax.tree.map(lambda _: self.placement.sharding.spec, dict(batch))
        function = self._manual(
            self._loss_and_gradients,
            (self.specs, batch_specs, PartitionSpec(), PartitionSpec()),
            (PartitionSpec(), PartitionSpec(), self.specs),
        )
        scale = jnp.asarray(loss_scale, jnp.float32)
        loss, tokens, grads = function(params, dict(batch), jnp.asarray(step, jnp.int32), scale)
        if isinstance(loss_scale, float) and loss_scale == 1.0:
            return loss, tokens, grads
        return loss / scale, tokens, jax.tree.map(lambda g: g / scale, grads)

    def _train_step(self, state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Any]:
        params = state["params"]
        scale = 1.0 if self.scaler is None else state["loss_scale"]["scale"]
        loss, tokens, grads = self.loss_and_gradients(params, batch, state["step"], scale)
        grads, grad_norm = clip_by_global_norm(grads, self.config.optimizer.clip_grad)
        before = state["opt_state"]
        if self.config.optimizer.offload:
            # Moments come to the device once the gradients are there, not before.
            before, grads = lax.optimization_barrier((before, grads))
            before = jax.device_put(before, self._opt_shardings)
        updates, opt_state = self.optimizer.update(grads, before, params)
        applies = tokens > 0
        if self.scaler is not None:  # one number for all devices: they decide alike
            finite = jnp.isfinite(grad_norm)
            applies &= finite
        threshold = self.config.optimizer.grad_norm_skip_threshold
        if threshold is not None:
            applies &= grad_norm <= threshold

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(functools.partial(jnp.where, applies), new, old)

        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.schedule(state["updates"]),
            "tokens": tokens,
            "skipped": jnp.int32(1) - applies,
        }
        new_state = {
            "params": keep(jax.tree.map(jnp.add, params, updates), params),
            "opt_state": keep(opt_state, before),
            "step": state["step"] + 1,
            "updates": state["updates"] + applies,
        }
        if self.config.optimizer.offload:
            new_state["opt_state"] = jax.device_put(
                new_state["opt_state"], self.state_shardings["opt_state"]
            )
        if self.scaler is not None:
            metrics["loss_scale"] = scale
            new_state["loss_scale"] = self.scaler.update(state["loss_scale"], finite)
        return new_state, metrics

    # -- evaluation and inference --------------------------------------------------------------

    def _eval_step(self, params: Any, batch: Mapping[str, jax.Array]) -> Any:
        """Sum of the loss over the batch's valid tokens, and their number."""

        def local(params: Any, batch: Mapping[str, jax.Array]) -> Any:
            copies = self.plan.copies(params)
            batch = {**batch, "token_weights": batch["loss_mask"]}

            def body(total: jax.Array, microbatch: Any) -> Any:
                return total + self._objective(copies, microbatch)[1], None

            loss, _ = lax.scan(body, jnp.zeros(()), batch)
            return self.region.sum(loss, AXES), self._count(batch["loss_mask"])

        batch_specs = jax.tree.map(lambda _: self.placement.sharding.spec, dict(batch))
        function = self._manual(
            local, (self.specs, batch_specs), (PartitionSpec(), PartitionSpec())
        )
        return function(params, dict(batch))

    def _next_token_logits(self, params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
        """fp32 logits ``[b, vocab_size]`` of the token after position ``last [b]``.

        ``tokens [b, s]`` are the same on every device, which takes its part of the sequence.
        """

        def local(params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            copies = self.plan.copies(params)
            positions = self.context.own_positions(tokens.shape[1])
            x = self._hidden(copies, {"tokens": tokens[:, positions]})
            is_last = positions == last[:, None]
            x = self.region.sum(jnp.where(is_last[..., None], x, 0).sum(axis=1), ("context",))
            weight = self.model.output_weight(copies, self.plan.fetch)
            return jnp.einsum("bh,vh->bv", x, weight, preferred_element_type=jnp.float32)

        vocab = self.rules.axes("vocab") or None
        function = self._manual(
            local,
            (self.specs, PartitionSpec(), PartitionSpec()),
            PartitionSpec(None, vocab),
        )
        return function(params, tokens, last)[:, : self.config.model.vocab_size]
