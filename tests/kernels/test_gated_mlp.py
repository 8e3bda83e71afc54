"""The gated MLP with the activation in its products: the derivative, recomputation, the choice."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtron.errors import ConfigError
from jaxtron.kernels import gated_mlp
from jaxtron.kernels.gated_mlp import GatedMlpKernels, GatedMlpSpec
from jaxtron.layers.inputs import LayerInputs
from jaxtron.layers.mlp import MLP
from jaxtron.layers.remat import by_name, recompute_all
from jaxtron.models.config import ModelConfig
from jaxtron.parallel.region import Region
from jaxtron.precision.fp8_weight import Fp8Weight

TOKENS, HIDDEN, INNER = 6, 5, 4


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the kernels, by their documented formulas."""

    def gate_up(x: jax.Array, w: jax.Array, *, blocks: int) -> tuple[jax.Array, jax.Array]:
        u = jnp.einsum("mh,hpf->mpf", x, w)
        return u, u[:, 0] * jax.nn.sigmoid(u[:, 0]) * u[:, 1]

    def d_gate_up(d_out: jax.Array, w: jax.Array, u: jax.Array, *, blocks: int) -> jax.Array:
        _, vjp = jax.vjp(lambda u: u[:, 0] * jax.nn.sigmoid(u[:, 0]) * u[:, 1], u)
        return vjp(d_out @ w.T)[0]

    monkeypatch.setattr(gated_mlp, "hopper_gate_up", gate_up)
    monkeypatch.setattr(gated_mlp, "hopper_d_gate_up", d_gate_up)
    monkeypatch.setattr(gated_mlp, "multiprocessors", lambda: 1)


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return draw(2, 3, HIDDEN), draw(HIDDEN, 2, INNER), draw(INNER, HIDDEN), draw(2, 3, HIDDEN)


def by_hand(x: Any, up: Any, down: Any, g: Any) -> tuple[np.ndarray, ...]:
    """Result and gradients in fp64, by the chain rule."""
    x, g = (a.reshape(TOKENS, HIDDEN).astype(np.float64) for a in (x, g))
    gate, value = x @ up[:, 0], x @ up[:, 1]
    act, sigmoid = silu(gate) * value, 1 / (1 + np.exp(-gate))
    d_act = g @ down.T
    d_gate = d_act * value * sigmoid * (1 + gate * (1 - sigmoid))
    d_value = d_act * silu(gate)
    d_x = d_gate @ up[:, 0].T + d_value @ up[:, 1].T
    d_up = np.stack([x.T @ d_gate, x.T @ d_value], axis=1)
    return (act @ down).reshape(2, 3, HIDDEN), d_x.reshape(2, 3, HIDDEN), d_up, act.T @ g


# policy of recomputation, and how often the up projection runs
POLICIES = {
    "kept": (None, 1),
    "full": (recompute_all(drop_gathered=False), 2),
    "both named": (
        by_name({"mlp_up": "recompute", "mlp_act": "recompute"}, drop_gathered=False),
        2,
    ),
    "named, kept": (by_name({"qkv": "recompute"}, drop_gathered=False), 1),
}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", POLICIES)
def test_result_and_gradients_are_those_by_hand(name: str) -> None:
    policy, runs = POLICIES[name]
    x, up, down, g = operands()
    mlp = lambda x, *weights: gated_mlp.gated_mlp([x], *weights)[0]  # noqa: E731
    if policy is not None:
        mlp = jax.checkpoint(mlp, policy=policy, prevent_cse=False)
    y, vjp = jax.vjp(mlp, *(jnp.asarray(a) for a in (x, up, down)))
    for actual, expected in zip((y, *vjp(jnp.asarray(g))), by_hand(x, up, down, g), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))
    program = str(jax.make_jaxpr(lambda *a: jax.vjp(mlp, *a)[1](jnp.asarray(g)))(x, up, down))
    # only the up projection makes [6, 2, 4] by a product
    assert program.count("f32[6,2,4] = dot_general") == runs


FITTING = GatedMlpSpec(256, 4096, 14336, "swiglu", False, "bfloat16")
REFUSED = [
    ({"dtype": "fp8"}, {}, "this MLP is in fp8"),
    ({"dtype": "float32"}, {}, "this MLP is in float32"),
    ({"activation": "geglu"}, {}, "this MLP is geglu"),
    ({"bias": True}, {}, "swiglu with biases"),
    ({"tokens": 384}, {}, "tokens must be a multiple of 256, and here is 384"),
    ({"inner": 640}, {}, "inner width must be a multiple of 256, and here is 640"),
    ({"hidden": 4000}, {}, "hidden size must be a multiple of 64, and here is 4000"),
    ({"hidden": 192}, {}, "at least 256, and is 192"),
    ({}, {"platform": "cpu"}, "this is a cpu"),
    ({}, {"recomputed": frozenset({"mlp_act"})}, "computes mlp_act again and keeps mlp_up"),
]


class Hopper:
    compute_capability = "9.0"


class Ampere:
    compute_capability = "8.0"


@pytest.mark.parametrize("spec,settings,reason", REFUSED, ids=lambda v: str(v)[:40])
def test_what_it_does_not_compute_is_refused_or_left_to_xla(
    spec: dict[str, Any], settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    kernels = GatedMlpKernels(**{"name": "mosaic_gpu", "platform": "gpu", "stages": 1, **settings})
    fitting = dataclasses.replace(kernels, platform="gpu", recomputed=frozenset())
    assert fitting.use(FITTING)
    with pytest.raises(ConfigError, match=f"gated_mlp_backend=mosaic_gpu.*{reason}.*auto or xla"):
        kernels.use(dataclasses.replace(FITTING, **spec))
    automatic = dataclasses.replace(kernels, name="auto")
    assert not automatic.use(dataclasses.replace(FITTING, **spec))


def test_it_is_chosen_on_hopper_gpus_without_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    one, staged = (GatedMlpKernels("auto", "gpu", stages) for stages in (1, 4))
    assert one.use(FITTING)
    assert not staged.use(FITTING)
    assert dataclasses.replace(staged, name="mosaic_gpu").use(FITTING)
    assert not dataclasses.replace(one, name="xla").use(FITTING)
    monkeypatch.setattr(jax, "devices", lambda: [Ampere()])
    assert not one.use(FITTING)
    with pytest.raises(ConfigError, match="this GPU has 8.0"):
        dataclasses.replace(one, name="mosaic_gpu").use(FITTING)


class Recorder:
    """Takes the place of :class:`GatedMlpKernels`."""

    def use(self, spec: GatedMlpSpec) -> bool:
        self.spec = spec
        return False


@pytest.mark.parametrize(
    ("fp8", "dtype"),
    [((), "float32"), (("up",), "fp8"), (("down",), "fp8"), (("up", "down"), "fp8")],
)
def test_an_mlp_with_any_product_in_fp8_is_none_in_bf16(fp8: tuple[str, ...], dtype: str) -> None:
    """``precision.fp8_exceptions`` can leave out one of the two."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER,
        num_attention_heads=1,
        vocab_size=8,
        max_position_embeddings=8,
        activation="swiglu",
    )
    mlp = MLP(config, nnx.Rngs(0), 0.02)
    x, up, down, _ = operands()
    weights: dict[str, Any] = {"up": jnp.asarray(up), "down": jnp.asarray(down)}
    for name in fp8:
        weights[name] = Fp8Weight(weights[name], *[None] * 5)  # type: ignore[arg-type]
    recorder = Recorder()
    inputs = LayerInputs(*[None] * 5, gated_mlp=recorder)  # type: ignore[arg-type]
    assert not mlp._fused(jnp.asarray(x), weights["up"], weights["down"], inputs)
    assert recorder.spec.dtype == dtype
    assert recorder.spec.tokens == TOKENS


class Always:
    """Takes the place of :class:`GatedMlpKernels`."""

    def use(self, spec: GatedMlpSpec) -> bool:
        return True


@pytest.mark.usefixtures("stand_ins")
def test_parts_of_a_sequence_are_multiplied_as_the_whole_and_one_behind_the_other() -> None:
    members = 3
    config = ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=INNER * members,
        num_attention_heads=1,
        vocab_size=8,
        max_position_embeddings=8,
        activation="swiglu",
    )
    rng = np.random.default_rng(1)
    up = rng.standard_normal((HIDDEN, 2, INNER * members)).astype(np.float32)
    down = rng.standard_normal((INNER * members, HIDDEN)).astype(np.float32)
    x, _, _, g = operands()  # of three tokens each
    region = Region({"tensor": members}, sequence_parallel=True, in_parts=True)
    inputs = LayerInputs(region, *[None] * 4, gated_mlp=Always())  # type: ignore[arg-type]
    graph = nnx.graphdef(MLP(config, nnx.Rngs(0), 0.02))

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        weights = nnx.State({"up": nnx.Param(up), "down": nnx.Param(down)})
        return nnx.merge(graph, weights)(x, inputs)

    def pulled(x: jax.Array, up: jax.Array, down: jax.Array, g: jax.Array) -> Any:
        y, vjp = jax.vjp(block, x, up, down)
        return y, *vjp(g)

    mesh = Mesh(np.array(jax.devices()[:members]), ("tensor",))
    tokens, up_at, down_at = P(None, "tensor"), P(None, None, "tensor"), P("tensor")
    mapped = jax.shard_map(
        pulled,
        mesh=mesh,
        in_specs=(tokens, up_at, down_at, tokens),
        out_specs=(tokens, tokens, up_at, down_at),
        check_vma=False,
    )
    actual = jax.jit(mapped)(x, up, down, g)
    for a, expected in zip(actual, by_hand(x, up, down, g), strict=True):
        np.testing.assert_allclose(a, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))
    # the second and the third part wait for the first product of the part before, forward alone
    assert str(jax.make_jaxpr(mapped)(x, up, down, g)).count("optimization_barrier") == members - 1
