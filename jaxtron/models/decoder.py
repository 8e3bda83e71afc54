"""The decoder-only transformer: GPT-2 to Llama 3."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtron.layers.embedding import Embedding
from jaxtron.layers.inputs import LayerInputs, LayerNumber
from jaxtron.layers.layer_loop import run_layers
from jaxtron.layers.multi_token import MultiTokenPrediction
from jaxtron.layers.norm import Norm
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.parameter import Product, normal
from jaxtron.layers.remat import Remat
from jaxtron.layers.rope import rotary_tables
from jaxtron.layers.transformer_layer import TransformerLayer
from jaxtron.models.config import ModelConfig
from jaxtron.models.layer_pattern import layer_name
from jaxtron.models.model import Fetch, Params
from jaxtron.parallel.gradient_sum import use_in_layers, used_once


class Output(nnx.Module):
    """Weight of an untied output layer, vocabulary first like the embedding's."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.weight = normal(
            rngs,
            (config.padded_vocab_size, config.hidden_size),
            ("vocab", "embed"),
            config.init_method_std,
            drawn_rows=config.vocab_size,
        )


def _selective(inputs: LayerInputs, remat: Remat) -> LayerInputs:
    """Inputs whose attention is recomputed, when that is all that is."""
    if remat.recompute != "selective":
        return inputs
    attend = jax.checkpoint(inputs.attend, prevent_cse=not remat.passes_apart)
    return replace(inputs, attend=attend)


def _of_layer(inputs: LayerInputs, *place: LayerNumber) -> LayerInputs:
    """Inputs of a layer: of the block with the given place among those that run, and if blocks have
    several layers, of the one with the given place among its layers with experts."""
    moe = inputs.moe
    if moe is None or moe.earlier is None:
        return inputs
    return replace(inputs, moe=replace(moe, earlier=moe.earlier[place]))


def _insert(tree: Params, part: str, value: Any) -> None:
    """Put a value into a nested dict, under ``layers`` or ``layers/layer_0``."""
    *above, name = part.split("/")
    for each in above:
        tree = tree.setdefault(each, {})
    tree[name] = value


class Decoder:
    """Embedding, a stack of layers, final norm and output layer.

    Parameters are a nested dict with the parts ``embedding, layers, final_norm`` and, when untied,
    ``output``; ``layers`` leaves hold all layers in their first dimension. Where layers with
    experts and without alternate, ``layers`` has a dict for each layer of the block that repeats,
    ``layer_0`` and so on, whose leaves hold all blocks. Dense layers that come before layers with
    experts are parts of their own, ``dense_0`` and so on, and so are the depths of multi-token
    prediction, ``mtp_0`` and so on. The methods that compute run inside the manual region, on local
    shards. Implements :class:`jaxtron.models.model.Model`.

    Attributes:
        products: per weight of a layer (``attention/query``) that goes through
            :func:`jaxtron.layers.linear.linear`, its product.
        sums_itself: names of the weights whose gradients it adds to the step's sums when they come
            as :class:`jaxtron.parallel.gradient_sum.SummedWeight`: those that it uses once, of the
            layers' those of experts.
        layer_class: module of a layer, constructed as ``layer_class(config, rngs)`` and called as
            ``layer(x, inputs, number)``; a subclass may set another.
    """

    layer_class: type[Any] = TransformerLayer

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._build: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
            "embedding": lambda rngs: Embedding(config, rngs),
            "final_norm": lambda rngs: Norm(config, config.hidden_size),
        }
        if config.untie_embeddings_and_output_weights:
            self._build["output"] = lambda rngs: Output(config, rngs)
        self.sums_itself: tuple[str, ...] = ()
        if config.untie_embeddings_and_output_weights and not config.mtp_num_layers:
            self.sums_itself = ("embedding/word", "output/weight")
        self._ahead = [f"mtp_{i}" for i in range(config.mtp_num_layers or 0)]
        for name in self._ahead:
            self._build[name] = lambda rngs: MultiTokenPrediction(config, rngs, self.layer_class)
        self._dense = [f"dense_{i}" for i in range(config.num_dense_layers)]
        for name in self._dense:
            self._build[name] = lambda rngs: self.layer_class(config, rngs, dense=True)
        self._block = ["layers"]
        if len(config.layer_block) > 1:
            self._block = [f"layers/{layer_name(i)}" for i in range(len(config.layer_block))]
        for name, experts in zip(self._block, config.layer_block, strict=True):
            self._build[name] = functools.partial(self._stacked_layer, bool(experts))
        self._graphs: dict[str, Any] = {}
        self.shapes: Params = {}
        self.logical: Params = {}
        self.products: dict[str, Product] = {}
        for part, build in self._build.items():
            abstract = nnx.eval_shape(lambda build=build: build(nnx.Rngs(params=0)))
            self._graphs[part], state = nnx.split(abstract, nnx.Param)
            stack = part in self._block
            shapes = jax.tree.map(
                lambda s, stack=stack: jax.ShapeDtypeStruct(
                    (config.stacked_blocks, *s.shape) if stack else s.shape, s.dtype
                ),
                nnx.to_pure_dict(state),
            )
            _insert(self.shapes, part, shapes)
            names: Params = {}
            for path, variable in nnx.to_flat_state(state):
                node = names
                for entry in path[:-1]:
                    node = node.setdefault(str(entry), {})
                metadata = variable.get_metadata()
                logical = tuple(metadata["logical"])
                if stack and metadata.get("product") is not None:
                    within = [*part.split("/")[1:], *map(str, path)]
                    self.products["/".join(within)] = metadata["product"]
                node[str(path[-1])] = ("layers", *logical) if stack else logical
            _insert(self.logical, part, names)
        self.sums_itself += tuple(
            f"layers/{name}" for name, product in self.products.items() if product.experts
        )

    def _stacked_layer(self, experts: bool, rngs: nnx.Rngs) -> Any:
        """A layer of the block that repeats."""
        dense = {} if experts else {"dense": True}
        return self.layer_class(self.config, rngs, **dense)

    def init(self, key: jax.Array) -> Params:
        """Initial parameters; they depend on ``key`` and the model's shape alone.

        Layer i, dense or not, draws from ``fold_in(key of layers, i)``, so that its weights do not
        depend on where it is placed or how many layers there are around it.
        """

        def part(build: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> Params:
            return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(params=key)), nnx.Param))

        alone = {*self._build} - {*self._dense, *self._ahead, *self._block}
        names = sorted({*alone, "layers"})
        keys = dict(zip(names, jax.random.split(key, 4), strict=False))
        for i, name in enumerate(self._dense):
            keys[name] = jax.random.fold_in(keys["layers"], i)
        for i, name in enumerate(self._ahead):
            keys[name] = jax.random.fold_in(keys["layers"], self.config.num_layers + i)
        params: Params = {}
        for name, build in self._build.items():
            if name in self._block:
                first = len(self._dense) + self._block.index(name)
                layer_keys = jax.vmap(jax.random.fold_in, (None, 0))(
                    keys["layers"], jnp.arange(first, self.config.num_layers, len(self._block))
                )
                layers = jax.vmap(lambda k, build=build: part(build, k))(layer_keys)
                _insert(params, name, layers)
            else:
                params[name] = part(build, keys[name])
        return params

    def tables(self, positions: jax.Array) -> Any:
        """Cosine and sine of the rotary embedding at ``positions [s]`` or ``[b, s]``, or None."""
        rope = self.config.position_embedding_type == "rope"
        return rotary_tables(self.config, positions) if rope else None

    def _embedding(self, params: Params, fetch: Fetch) -> Embedding:
        return nnx.merge(self._graphs["embedding"], fetch("embedding", params["embedding"]))

    def lookup(
        self, params: Params, fetch: Fetch, tokens: jax.Array, inputs: LayerInputs
    ) -> jax.Array:
        """This stage's share of the word embeddings ``[b, s/tensor, h]`` of ``tokens [b, s]``."""
        return self._embedding(params, fetch).lookup(tokens, inputs.region)

    def embed(
        self,
        params: Params,
        fetch: Fetch,
        x: jax.Array,
        positions: jax.Array,
        inputs: LayerInputs,
    ) -> jax.Array:
        """Input of the first stacked layer ``[b, s/tensor, h]`` from the word embeddings."""
        x = self._embedding(params, fetch)(x, positions, inputs.region)
        if self.config.fp32_residual_connection:
            x = x.astype(jnp.float32)
        x = inputs.hidden_dropout(x, 0, "embedding")
        for i, name in enumerate(self._dense):
            x = nnx.merge(self._graphs[name], fetch(name, params[name]))(x, inputs, i).x
        return x

    def run_layers(
        self,
        layers: Any,
        fetch: Fetch,
        x: jax.Array,
        first: LayerNumber,
        inputs: LayerInputs,
        remat: Remat,
    ) -> LayerOutput:
        """Advance ``x [b, s/tensor, h]`` by consecutive layers, beginning with number ``first``.

        Where blocks have several layers, ``layers`` are blocks, and ``first`` is a block's number.

        Args:
            layers: weights as copied for compute: a list of one dict a layer (the loop is unrolled)
                or one dict of stacked leaves (the loop is a scan).
            fetch: ``(part, weights) -> weights`` as a layer uses them; gathers under ZeRO-3.
            x: the residual stream.
            first: number of the first of the layers in the whole model.
            inputs: what the layers see besides.
            remat: what the backward pass computes again.
        """
        inputs = _selective(inputs, remat)
        use_in_layers(layers)
        size = len(self._block)

        def layer(i: int, x: jax.Array, weights: Params, number: LayerNumber) -> LayerOutput:
            part, place = self._block[i], [number - first]
            if size > 1:
                weights = weights[layer_name(i)]
                place.append(sum(self.config.layer_block[:i]))
            own = _of_layer(inputs, *place) if self.config.layer_block[i] else inputs
            with used_once(weights) as weights:
                module = nnx.merge(self._graphs[part], fetch(part, weights))
                return module(x, own, number * size + i + len(self._dense))

        block = [functools.partial(layer, i) for i in range(size)]
        return run_layers(block, x, layers, remat, first)

    def predict_ahead(
        self,
        params: Params,
        fetch: Fetch,
        depth: int,
        x: jax.Array,
        word: jax.Array,
        inputs: LayerInputs,
        remat: Remat,
    ) -> LayerOutput:
        """See :class:`jaxtron.models.ahead.PredictsAhead`."""
        name = self._ahead[depth]
        inputs = _selective(inputs, remat)
        if self.config.fp32_residual_connection:
            word = word.astype(jnp.float32)

        def layer(x: jax.Array, weights: Params, number: LayerNumber) -> LayerOutput:
            module = nnx.merge(self._graphs[name], fetch(name, weights))
            return module(x, word, inputs, number)

        out = run_layers([layer], x, [params[name]], remat, self.config.num_layers + depth)
        return out._replace(report=jax.tree.map(lambda a: a[0], out.report))

    def final(self, params: Params, fetch: Fetch, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Final normalised hidden states ``[b, s, h]`` from the last layer's output."""
        norm = nnx.merge(self._graphs["final_norm"], fetch("final_norm", params["final_norm"]))
        return inputs.region.gather_sequence(norm(x, inputs.dtype))

    def output_weight(self, params: Params, fetch: Fetch) -> jax.Array:
        """Weight of the output layer ``[vocab/parts, h]``: its own, or the embedding's."""
        if self.config.untie_embeddings_and_output_weights:
            return fetch("output", params["output"])["weight"]
        return fetch("embedding", params["embedding"])["word"]
