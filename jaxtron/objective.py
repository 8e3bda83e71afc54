"""What a step's microbatches contribute to the loss: weights of tokens, and the way to the loss."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtron.config.config import Config
from jaxtron.kernels.attention_spec import AttentionBackend
from jaxtron.kernels.gated_mlp import GatedMlpKernels
from jaxtron.layers.cross_entropy import CrossEntropy
from jaxtron.layers.inputs import LayerInputs, LayerNumber, MoEInputs, Randomness
from jaxtron.layers.moe.step import live_tokens
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.remat import Remat, remat_layer
from jaxtron.mesh.rules import LogicalRules
from jaxtron.models.ahead import PredictsAhead, ahead_objective
from jaxtron.models.model import Model
from jaxtron.observe.flops import mean_causal_keys_of
from jaxtron.parallel.computation import Computation
from jaxtron.parallel.context.attention import ContextAttention
from jaxtron.parallel.microbatches import GradientPlan
from jaxtron.parallel.region import Region
from jaxtron.precision.dtypes import DTYPES


@dataclass(frozen=True)
class Objective:
    """The local view of a microbatch, inside the manual region.

    Attributes:
        config: of the run.
        model: what is trained.
        plan: how its weights reach the layers.
        region: the manual region.
        rules: the axes of logical axes.
        context: how rows lie on the context axis.
        attention_backend: the kernel.
        seq_length: tokens of a row.
        rows_per_microbatch: of the whole microbatch.
        platform: of the devices.
    """

    config: Config
    model: Model
    plan: GradientPlan
    region: Region
    rules: LogicalRules
    context: ContextAttention
    attention_backend: AttentionBackend
    seq_length: int
    rows_per_microbatch: int
    platform: str

    @property
    def cross_entropy(self) -> CrossEntropy:
        """The output layer's loss."""
        return CrossEntropy(
            region=self.region,
            vocab_size=self.config.model.vocab_size,
            z_loss_coeff=self.config.loss.z_loss_coeff,
            chunk_tokens=self.config.loss.chunk_tokens,
            logits_dtype=DTYPES[self.config.precision.logits],
        )

    def computation(self, step: jax.Array | None = None, head: Any = None) -> Computation:
        """A microbatch's way to its objective; ``step`` turns dropout on.

        ``head`` replaces the loss by ``(copies, side, hidden states [b, s, h]) -> report``.
        """
        config, model, fetch = self.config, self.model, self.plan.fetch
        remat = Remat(
            config.train.recompute,
            config.train.recompute_method,
            config.train.recompute_num_layers,
            self.plan.gathers_in_layer and config.parallel.reshard_after_forward,
            self.region.sizes["pipeline"] > 1,
        )
        cross_entropy = self.cross_entropy
        positions = self.context.own_positions(self.seq_length)
        tables = model.tables(positions)

        def side(batch: Any) -> Any:
            length = batch["tokens"].shape[1]
            own = positions
            if length != len(positions):
                own = self.context.own_positions(length * self.context.layout.size)
            rotary = tables if own is positions else model.tables(own)
            if "position_ids" in batch:  # counted from the start of each document
                rotary = model.tables(batch["position_ids"])
            return {"position_ids": own, **batch, "positions": own, "tables": rotary}

        def lookup(copies: Any, side: Any) -> jax.Array:
            return model.lookup(copies, fetch, side["tokens"], self.inputs(side, step))

        affine = not config.model.num_dense_layers

        def embed(copies: Any, side: Any, x: jax.Array) -> jax.Array:
            inputs = self.inputs(side, step)

            def embedded(parts: Any, x: jax.Array) -> jax.Array:
                return model.embed(parts, fetch, x, side["position_ids"], inputs)

            parts = {part: weights for part, weights in copies.items() if part != "layers"}
            # on a pipeline the gradient begins with the words anyway
            if not affine and self.region.sizes["pipeline"] == 1:
                embedded = remat_layer(
                    embedded, remat.recompute, drop_gathered=remat.drop_gathered, apart=False
                )
            return embedded(parts, x)

        def layers(
            weights: Any, side: Any, x: jax.Array, first: LayerNumber, earlier: Any
        ) -> LayerOutput:
            inputs = self.inputs(side, step)
            if earlier is not None and inputs.moe is not None:
                moe = dataclasses.replace(inputs.moe, earlier=earlier["load"])
                inputs = dataclasses.replace(inputs, moe=moe)
            return model.run_layers(weights, fetch, x, first, inputs, remat)

        def loss(copies: Any, side: Any, x: jax.Array) -> Any:
            inputs = self.inputs(side, step)
            with jax.named_scope("loss"):
                x = model.final(copies, fetch, x, inputs)
            if head is not None:
                return jnp.zeros(()), head(copies, side, x)
            weight = model.output_weight(copies, fetch)

            def predicted(x: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
                return cross_entropy(
                    x.reshape(-1, x.shape[-1]),
                    weight,
                    targets["labels"].reshape(-1),
                    targets["token_weights"].reshape(-1),
                )

            objective, plain = predicted(x, side)
            if "ahead" not in side:
                return objective, plain
            assert isinstance(model, PredictsAhead)
            # the head's backward pass follows at once, on a pipeline too
            kept = dataclasses.replace(remat, passes_apart=False)
            added, reports = ahead_objective(
                model, config.model, copies, fetch, x, side["ahead"], inputs, kept, predicted
            )
            return objective + added, (plain, reports)

        looks_back = config.model.moe_router_load_balancing_type == "global_aux_loss"
        return Computation(side, lookup, embed, layers, loss, affine, looks_back)

    def inputs(self, side: Any, step: jax.Array | None) -> LayerInputs:
        """What layers see of a microbatch besides the residual stream."""
        config = self.config
        randomness = None
        if step is not None and config.model.random:
            randomness = Randomness(
                config=config.model,
                region=self.region,
                seed=config.train.seed,
                step=step,
                rows=side["rows"],
                positions=side["positions"],
            )
        moe = None
        if config.model.num_experts is not None:
            moe = MoEInputs(
                token_weights=side["router_weights"],
                positions=side["positions"],
                expert_axes=self.rules.axes("experts"),
                platform=self.platform,
                training=step is not None,
            )
        return LayerInputs(
            region=self.region,
            attend=self.context.attend(
                side["tokens"].shape[1] * self.context.layout.size,
                scale=1 / math.sqrt(config.model.head_dim),
                window=config.model.window_size,
                segment_ids=side.get("segment_ids"),
                backend=self.attention_backend,
            ),
            rotary=side["tables"],
            randomness=randomness,
            dtype=DTYPES[config.precision.compute],
            moe=moe,
            gated_mlp=self._gated_mlp(),
        )

    def _gated_mlp(self) -> GatedMlpKernels:
        recompute = self.config.train.recompute
        again = recompute.items() if isinstance(recompute, dict) else ()
        return GatedMlpKernels(
            name=self.config.model.gated_mlp_backend,
            platform=self.platform,
            stages=self.region.sizes["pipeline"],
            recomputed=frozenset(name for name, action in again if action == "recompute"),
        )

    def live(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Tokens that routers work for, fp32 like ``loss_mask [microbatch, row, seq]``."""
        if "document_length" in batch:
            return (batch["document_length"] > 0).astype(jnp.float32)
        loss_mask = batch["loss_mask"]
        positions = self.context.own_positions(loss_mask.shape[-1] * self.context.layout.size)
        return live_tokens(loss_mask, positions, self.region)

    def attention_work(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Of packed rows, what a step's operations are counted from; else nothing.

        ``real_tokens`` of documents, and the keys that they meet: ``causal_keys``, ``full_keys``.
        """
        if "document_length" not in batch:
            return {}
        lengths = batch["document_length"]
        causal = mean_causal_keys_of(lengths, self.config.model.window_size)
        return {
            "real_tokens": self.region.sum(jnp.sum(lengths > 0), self._axes()),
            "causal_keys": self.region.sum(jnp.sum(causal), self._axes()),
            "full_keys": self.region.sum(jnp.sum(lengths, dtype=jnp.float32), self._axes()),
        }

    def _axes(self) -> tuple[str, ...]:
        return (*self.rules.axes("batch"), *self.rules.axes("sequence"))

    def token_weights(self, loss_mask: jax.Array, total: jax.Array | None = None) -> jax.Array:
        """Weight of every token ``[microbatch, row, seq]`` in the objective.

        ``total`` is the sum of ``loss_mask`` over the step, where this is not all of it.
        """
        axes = self._axes()
        if total is not None:
            return loss_mask / jnp.maximum(total, 1)
        if self.config.loss.reduction == "token":
            return loss_mask / jnp.maximum(self.region.sum(jnp.sum(loss_mask), axes), 1)
        totals = self.region.sum(jnp.sum(loss_mask, axis=(1, 2), keepdims=True), axes)
        return loss_mask / (jnp.maximum(totals, 1) * loss_mask.shape[0])

    def count(self, loss_mask: jax.Array) -> jax.Array:
        """Tokens of the step with a loss."""
        return self.region.sum(jnp.sum(loss_mask > 0, dtype=jnp.int32), self._axes())

    def global_rows(self, microbatches: int, rows: int) -> jax.Array:
        """Rows of the global batch ``[microbatch, row]`` that this device holds."""
        shard: jax.Array | int = 0
        for axis in self.rules.axes("batch"):
            shard = shard * self.region.sizes[axis] + lax.axis_index(axis)
        first = jnp.arange(microbatches, dtype=jnp.int32) * self.rows_per_microbatch
        held = first[:, None] + shard * rows + jnp.arange(rows, dtype=jnp.int32)
        groups = self.context.layout.groups
        return held if groups == 1 else held * groups + self.context.layout.group()
