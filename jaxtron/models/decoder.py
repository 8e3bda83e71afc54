"""The decoder-only transformer: GPT-2 to Llama 3."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtron.layers.embedding import Embedding
from jaxtron.layers.inputs import Attend, LayerInputs, LayerNumber, Randomness
from jaxtron.layers.layer_loop import run_layers
from jaxtron.layers.norm import Norm
from jaxtron.layers.parameter import Product, normal
from jaxtron.layers.remat import Remat
from jaxtron.layers.rope import rotary_tables
from jaxtron.layers.transformer_layer import TransformerLayer
from jaxtron.models.config import ModelConfig
from jaxtron.models.model import Fetch, Params
from jaxtron.parallel.region import Region


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


class Decoder:
    """Embedding, a stack of layers, final norm and output layer.

    Parameters are a nested dict with the parts ``embedding, layers, final_norm`` and, when untied,
    ``output``; ``layers`` leaves hold all layers in their first dimension. The methods that compute
    run inside the manual region, on local shards. Implements
    :class:`jaxtron.models.model.Model`.

    Attributes:
        products: per weight of a layer (``attention/query``) that goes through
            :func:`jaxtron.layers.linear.linear`, its product.
        layer_class: module of a layer, constructed as ``layer_class(config, rngs)`` and called as
            ``layer(x, inputs, number)``; a subclass may set another.
    """

    layer_class: type[Any] = TransformerLayer

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._build: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
            "embedding": lambda rngs: Embedding(config, rngs),
            "layers": lambda rngs: self.layer_class(config, rngs),
            "final_norm": lambda rngs: Norm(config, config.hidden_size),
        }
        if config.untie_embeddings_and_output_weights:
            self._build["output"] = lambda rngs: Output(config, rngs)
        self._graphs: dict[str, Any] = {}
        self.shapes: Params = {}
        self.logical: Params = {}
        self.products: dict[str, Product] = {}
        for part, build in self._build.items():
            abstract = nnx.eval_shape(lambda build=build: build(nnx.Rngs(params=0)))
            self._graphs[part], state = nnx.split(abstract, nnx.Param)
            stack = part == "layers"
            self.shapes[part] = jax.tree.map(
                lambda s, stack=stack: jax.ShapeDtypeStruct(
                    (config.num_layers, *s.shape) if stack else s.shape, s.dtype
                ),
                nnx.to_pure_dict(state),
            )
            names: Params = {}
            for path, variable in nnx.to_flat_state(state):
                node = names
                for entry in path[:-1]:
                    node = node.setdefault(str(entry), {})
                metadata = variable.get_metadata()
                logical = tuple(metadata["logical"])
                if stack and metadata.get("product") is not None:
                    self.products["/".join(map(str, path))] = metadata["product"]
                node[str(path[-1])] = ("layers", *logical) if stack else logical
            self.logical[part] = names

    def init(self, key: jax.Array) -> Params:
        """Initial parameters; they depend on ``key`` and the model's shape alone.

        Layer i draws from ``fold_in(key of layers, i)``, so that its weights do not depend on where
        it is placed or how many layers there are around it.
        """

        def part(build: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> Params:
            return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(params=key)), nnx.Param))

        keys = dict(zip(sorted(self._build), jax.random.split(key, 4), strict=False))
        params = {}
        for name, build in self._build.items():
            if name == "layers":
                layer_keys = jax.vmap(jax.random.fold_in, (None, 0))(
                    keys[name], jnp.arange(self.config.num_layers)
                )
                params[name] = jax.vmap(lambda k, build=build: part(build, k))(layer_keys)
            else:
                params[name] = part(build, keys[name])
        return params

    def hidden(
        self,
        params: Params,
        fetch: Fetch,
        tokens: jax.Array,
        positions: jax.Array,
        region: Region,
        attend: Attend,
        *,
        randomness: Randomness | None = None,
        remat: Remat,
    ) -> jax.Array:
        """Final normalised hidden states ``[b, s, h]`` of ``tokens [b, s]``.

        Args:
            params: parts as copied for compute; ``layers`` is a list of one dict a layer (the loop
                is unrolled) or one dict of stacked leaves (the loop is a scan).
            fetch: ``(part, weights) -> weights`` as layers use them; gathers under ZeRO-3.
            tokens: ids.
            positions: ``[s]`` or ``[b, s]``.
            region: the manual region.
            attend: the attention kernel.
            randomness: dropout, in training.
            remat: what the backward pass computes again.
        """
        config = self.config
        embedding = nnx.merge(self._graphs["embedding"], fetch("embedding", params["embedding"]))
        x = embedding(tokens, positions, region)
        rotary = (
            rotary_tables(config, positions) if config.position_embedding_type == "rope" else None
        )
        inputs = LayerInputs(
            region=region,
            attend=jax.checkpoint(attend) if remat.recompute == "selective" else attend,
            rotary=rotary,
            randomness=randomness,
            dtype=x.dtype,
        )
        if config.fp32_residual_connection:
            x = x.astype(jnp.float32)
        x = inputs.hidden_dropout(x, 0, "embedding")

        def layer(x: jax.Array, weights: Params, number: LayerNumber) -> jax.Array:
            return nnx.merge(self._graphs["layers"], fetch("layers", weights))(x, inputs, number)

        x = run_layers(layer, x, params["layers"], remat)
        norm = nnx.merge(self._graphs["final_norm"], fetch("final_norm", params["final_norm"]))
        return region.gather_sequence(norm(x, inputs.dtype))

    def output_weight(self, params: Params, fetch: Fetch) -> jax.Array:
        """Weight of the output layer ``[vocab/tensor, h]``: its own, or the embedding's."""
        if self.config.untie_embeddings_and_output_weights:
            return fetch("output", params["output"])["weight"]
        return fetch("embedding", params["embedding"])["word"]
