"""Recomputation and offload of activations: what is kept, and that gradients do not change."""

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxtron.config.load import load_config
from jaxtron.config.validate import validate
from jaxtron.errors import ConfigError
from jaxtron.kernels.attention import ATTENTION_BACKENDS, dot_product_attention
from jaxtron.layers.activation_names import ACTIVATION_NAMES, GATHERED_WEIGHT
from jaxtron.layers.inputs import LayerInputs
from jaxtron.layers.layer_loop import run_layers
from jaxtron.layers.outputs import LayerOutput
from jaxtron.layers.remat import Remat, by_name, save_arithmetic
from jaxtron.mesh.axes import AXES
from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.parallel.region import Region
from tests.parity.harness import make_config
from tests.program.jaxprs import equations

ROWS, SEQ, LAYERS = 2, 8, 3
MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=12,
    num_attention_heads=2,
    ffn_hidden_size=20,
    vocab_size=16,
    make_vocab_size_divisible_by=16,
    max_position_embeddings=SEQ,
    qk_layernorm=True,
)
# without sequence parallelism
NAMES = sorted(ACTIVATION_NAMES.keys() - {"gathered_sequence"})
REMATS = {
    "selective": Remat("selective"),
    "full": Remat("full"),
    "nothing listed": Remat({}),
    "recomputed by name": Remat({"mlp_up": "recompute", "mlp_act": "recompute", "qkv": "save"}),
    "all recomputed": Remat(dict.fromkeys(NAMES, "recompute")),
    "offloaded": Remat({"qkv": "offload", "core_attn": "offload", "mlp_up": "recompute"}),
    "dropped weights": Remat({"mlp_act": "offload"}, drop_gathered=True),
    "uniform, divisible": Remat("full", "uniform", 3),
    "uniform with a rest": Remat("full", "uniform", 2),
    "block": Remat("full", "block", 2),
    "all layers in the block": Remat("full", "block", 3),
}


def attend(q: Any, k: Any, v: Any, dropout: Any) -> jax.Array:
    return dot_product_attention(
        q, k, v, scale=1 / math.sqrt(6), causal=True, backend=ATTENTION_BACKENDS["xla"]
    )


@functools.cache
def decoder() -> tuple[Decoder, Any]:
    model = Decoder(MODEL)
    rng = np.random.default_rng(0)
    draw = lambda s: jnp.asarray(0.5 * rng.standard_normal(s.shape), s.dtype)  # noqa: E731
    return model, jax.tree.map(draw, model.shapes)


def objective(params: Any, loop: str, remat: Remat) -> jax.Array:
    """Some function of the final hidden states, outside of any mesh."""
    model, _ = decoder()
    if loop == "unroll":
        each = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(LAYERS)]
        params = {**params, "layers": each}
    tokens = jnp.arange(ROWS * SEQ, dtype=jnp.int32).reshape(ROWS, SEQ) % 16
    positions = jnp.arange(SEQ, dtype=jnp.int32)
    region = Region(dict.fromkeys(AXES, 1), sequence_parallel=False)
    fetch = lambda _, weights: weights  # noqa: E731
    inputs = LayerInputs(
        region=region,
        attend=attend,
        rotary=model.tables(positions),
        randomness=None,
        dtype=jnp.dtype(jnp.float32),
    )
    x = model.embed(params, fetch, model.lookup(params, fetch, tokens, inputs), positions, inputs)
    x = model.run_layers(params["layers"], fetch, x, 0, inputs, remat).x
    x = model.final(params, fetch, x, inputs)
    return jnp.sum(jnp.sin(x))


def gradient(loop: str, remat: Remat) -> Any:
    return jax.grad(functools.partial(objective, loop=loop, remat=remat))


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_gradients_are_the_same_under_every_policy(loop: str) -> None:
    _, params = decoder()
    params = {part: weights for part, weights in params.items() if part != "output"}  # not read
    plain = jax.jit(gradient("scan", Remat()))(params)
    # one program, so that the policies share a compilation
    recomputed = jax.jit(lambda p: {name: gradient(loop, r)(p) for name, r in REMATS.items()})
    for name, grads in recomputed(params).items():
        for expected, actual in zip(jax.tree.leaves(plain), jax.tree.leaves(grads), strict=True):
            scale = float(jnp.max(jnp.abs(expected)))
            assert scale > 0
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * scale, err_msg=name)


def origin(var: Any, jaxpr: Any) -> Any:
    """The equation that ``var`` comes from, in the function where it is computed."""
    producers = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqn = producers[id(var)]
    while eqn.primitive.name in ("reduce_precision", "device_put"):
        eqn = producers[id(eqn.invars[0])]
    if eqn.primitive.name != "jit" or "jaxpr" not in eqn.params:
        return eqn
    called = eqn.params["jaxpr"].jaxpr
    return origin(called.outvars[eqn.outvars.index(var)], called)


def residuals(loop: str, remat: Remat) -> list[tuple[str | None, Any]]:
    """What the forward pass hands to the backward pass, without its inputs: name, abstract value.

    The name is None for a value without one, and for all values out of a scan.
    """
    forward = jax.make_jaxpr(
        lambda p: jax.vjp(functools.partial(objective, loop=loop, remat=remat), p)
    )(decoder()[1]).jaxpr
    producers = {id(v): eqn for eqn in forward.eqns for v in eqn.outvars}
    found = []
    for var in {id(v): v for v in forward.outvars[1:] if id(v) in producers}.values():
        eqn = origin(var, forward)
        found.append((eqn.params["name"] if eqn.primitive.name == "name" else None, var.aval))
    return found


def shapes(loop: str, remat: Remat) -> list[tuple[int, ...]]:
    return [aval.shape for _, aval in residuals(loop, remat)]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_kept_unless_it_is_recomputed(name: str) -> None:
    # query, key and value; with qk_layernorm query and key before the norm too
    counts = {other: LAYERS * (5 if other == "qkv" else 1) for other in NAMES}
    assert Counter(name for name, _ in residuals("unroll", Remat({})) if name) == counts
    kept = Counter(name for name, _ in residuals("unroll", Remat({name: "recompute"})) if name)
    assert kept == {other: count for other, count in counts.items() if other != name}


def on_host(loop: str, remat: Remat) -> list[Any]:
    return [aval for _, aval in residuals(loop, remat) if "Host" in repr(aval.memory_space)]


@pytest.mark.parametrize("loop", ["scan", "unroll"])
@pytest.mark.parametrize("name", NAMES)
def test_an_offloaded_name_is_in_host_memory_and_nothing_else_is(name: str, loop: str) -> None:
    count = 5 if name == "qkv" else 1
    found = on_host(loop, Remat({name: "offload"}))
    assert len(found) == count * (1 if loop == "scan" else LAYERS)
    assert not on_host(loop, Remat({}))


def test_values_without_a_name_are_computed_again() -> None:
    """Of a scanned layer are kept: its input, and the named activations; all else is a weight."""
    leading = (LAYERS, ROWS, SEQ)
    kept = [s[3:] for s in shapes("scan", Remat({})) if s[:3] == leading]
    stream, heads, up, act = (12,), (2, 6), (2, 20), (20,)
    assert sorted(kept) == sorted([stream] * (1 + 3) + [heads] * (5 + 1) + [up, act])
    for remat in (Remat("full"), Remat(dict.fromkeys(NAMES, "recompute"))):
        assert [s[3:] for s in shapes("scan", remat) if s[:3] == leading] == [stream]


def test_uniform_keeps_the_input_of_a_group_and_block_that_of_its_first_layers() -> None:
    def kept(remat: Remat) -> Counter[tuple[int, ...]]:
        """Leading dimensions of what is kept in the form of the residual stream, per number."""
        stream = (ROWS, SEQ, 12)
        return Counter(s[:-3] for s in shapes("scan", remat) if s[-3:] == stream and len(s) > 3)

    assert kept(Remat("full", "uniform", 3)) == {(1,): 1}
    assert kept(Remat("full", "uniform", 1)) == {(3,): 1}
    plain = kept(Remat())[(3,)]
    assert plain > 1
    assert kept(Remat("full", "block", 2)) == {(2,): 1, (1,): plain}


def test_temporary_bytes_fall_with_what_is_recomputed() -> None:
    _, params = decoder()
    policies = {
        "none": Remat(),
        "mixed": Remat({"mlp_up": "recompute", "mlp_act": "recompute", "qkv": "recompute"}),
        "full": Remat("full"),
    }
    temporary = {
        name: jax.jit(gradient("scan", remat))
        .lower(params)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for name, remat in policies.items()
    }
    print(temporary)
    assert temporary["full"] < temporary["mixed"] < temporary["none"]


@pytest.mark.parametrize("scanned", [True, False])
def test_recomputation_is_shielded_from_elimination_except_in_a_scan(scanned: bool) -> None:
    loop = "scan" if scanned else "unroll"
    for remat in (Remat("full"), Remat({}), Remat("full", "uniform", 3)):
        jaxpr = jax.make_jaxpr(gradient(loop, remat))(decoder()[1]).jaxpr
        found = [e.params["prevent_cse"] for e in equations(jaxpr) if "prevent_cse" in e.params]
        assert found and all(flag is (not scanned) for flag in found)


@pytest.mark.parametrize("remat", [Remat("none"), Remat({}), Remat("full"), Remat("selective")])
@pytest.mark.parametrize("drop", [True, False])
def test_gathered_weights_are_kept_or_dropped_whatever_is_recomputed(
    remat: Remat, drop: bool
) -> None:
    """A gather is a name on the weight, here as in ZeRO-3."""

    def layer(x: jax.Array, w: jax.Array, number: Any) -> LayerOutput:
        return LayerOutput(jnp.tanh(x @ checkpoint_name(jnp.concatenate([w, w]), GATHERED_WEIGHT)))

    kept = Remat(remat.recompute, drop_gathered=drop)
    forward = jax.make_jaxpr(
        lambda x, w: jax.vjp(lambda x, w: run_layers([layer], x, w, kept).x, x, w)[1]
    )(jnp.ones((5, 4)), jnp.ones((LAYERS, 2, 4)))
    kept_shapes = [v.aval.shape for v in forward.jaxpr.outvars]
    assert ((LAYERS, 4, 4) in kept_shapes) is (not drop)


def test_a_fused_kernel_follows_core_attn() -> None:
    """Its statistics have no name; recomputing them alone would run the kernel a second time."""

    class Fused:
        def __str__(self) -> str:
            return "dot_product_attention_fwd_wrapper"

    answers = {
        action: by_name({"core_attn": action}, drop_gathered=True)(Fused())
        for action in ("save", "recompute", "offload")
    }
    assert answers["save"] is True and answers["recompute"] is False
    assert (answers["offload"].src, answers["offload"].dst) == ("device", "pinned_host")
    assert by_name({}, drop_gathered=True)(Fused()) is True
    assert save_arithmetic(Fused())


@pytest.mark.parametrize(
    ("train", "parallel", "message"),
    [
        ({"recompute": {"mlp_upp": "save"}}, {}, "train.recompute.mlp_upp.*did you mean mlp_up"),
        ({"recompute": {"qkv": "drop"}}, {}, "qkv is 'drop': expected one of save, recompute"),
        ({"recompute": "some"}, {}, "none, selective, full, or a mapping"),
        ({"recompute": {"gathered_sequence": "save"}}, {}, "sequence parallelism only"),
        (
            {"recompute": {"gathered_sequence": "save"}},
            {"tensor": 2, "sequence_parallel": False},
            "sequence parallelism only",
        ),
        ({"recompute": "full", "recompute_num_layers": 2}, {}, "set train.recompute_method to"),
        ({"recompute": "full", "recompute_method": "block"}, {}, "a number from 1 to 4"),
        (
            {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 5},
            {},
            "5 is more than model.num_layers 4",
        ),
        ({"recompute_method": "uniform", "recompute_num_layers": 2}, {}, "recompute to full"),
    ],
)
def test_what_means_nothing_is_refused(train: Any, parallel: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(make_config(train=train, parallel=parallel), parallel.get("tensor", 1))


def test_an_override_sets_one_name() -> None:
    config = load_config("llama3_8b", ["train.steps=1", "train.recompute.qkv=offload"])
    assert config.train.recompute == {"qkv": "offload"}
