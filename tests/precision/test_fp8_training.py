"""Training with ``precision.fp8``: parity on meshes, exceptions, what is gathered, refusals."""

import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.errors import ConfigError
from jaxtron.log_once import log_once
from jaxtron.precision import fp8_te
from jaxtron.precision.fp8_te import require_transformer_engine
from jaxtron.precision.fp8_weight import is_fp8
from jaxtron.precision.quantise import E4M3
from jaxtron.program import Program
from tests.parity.harness import (
    assert_close_leaves,
    assert_replicas_equal,
    initial_state,
    make_batch,
    make_config,
    rows_of,
)

MODEL = {"num_layers": 2}


def program(
    precision: dict[str, Any], parallel: dict[str, Any] | None = None, **sections: Any
) -> Program:
    raw = {"fp8": "current", **precision}
    model = {**MODEL, **sections.pop("model", {})}
    config = make_config(model=model, parallel=parallel, precision=raw, **sections)
    count = int(np.prod([v for v in (parallel or {}).values() if type(v) is int], initial=1))
    return Program(config, jax.devices()[:count])


Gradients = tuple[float, Any]
"""Loss and gradients of a batch."""


@functools.lru_cache
def on_one_device(scope: str, microbatches: int) -> list[Gradients]:
    precision = {"fp8": None} if scope == "none" else {"fp8_amax_scope": scope}
    return gradients(program(precision, train={"num_microbatches": microbatches}))


def gradients(p: Program) -> list[Gradients]:
    """Of three batches."""
    params = initial_state(p)["params"]
    compute = jax.jit(p.loss_and_gradients)
    found = []
    for step in range(3):
        loss, _, grads = compute(params, rows_of(p, make_batch(p.config, step)))
        grads = p.to_logical({"params": grads})["params"]
        found.append((float(loss), jax.tree.map(np.asarray, grads)))
    return found


def assert_alike(actual: list[Gradients], expected: list[Gradients]) -> None:
    """Within 1e-3; of one batch, as far apart as a single value's rounding can put it.

    The last bit of a sum, which no mesh need have, says to which side a value falls that lies in
    the middle of two FP8 values.
    """
    apart = 0
    for (loss, grads), (loss_e, grads_e) in zip(actual, expected, strict=True):
        np.testing.assert_allclose(loss, loss_e, rtol=1e-5)
        assert_close_leaves(grads, grads_e, 0.05, "gradient")
        try:
            np.testing.assert_allclose(loss, loss_e, rtol=1e-6)
            assert_close_leaves(grads, grads_e, 1e-3, "gradient")
        except AssertionError:
            apart += 1
    assert apart <= 1


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({"tensor": 2, "data": 2}, {"num_microbatches": 2}),
        (
            {"fsdp": 2, "tensor": 2, "sequence_parallel": False},
            {"num_microbatches": 2, "layer_loop": "unroll"},
        ),
        (
            {"fsdp": 4, "tensor": 2, "data_sharding": "optim_grads_params"},
            {"num_microbatches": 2},
        ),
        (
            {"data": 2, "fsdp": 2, "data_sharding": "optim_grads"},
            {"num_microbatches": 2, "layer_loop": "unroll", "recompute": "full"},
        ),
        ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 2}),
        (
            {"pipeline": 2, "fsdp": 2, "data_sharding": "optim_grads"},
            {"num_microbatches": 2, "layer_loop": "unroll"},
        ),
    ],
)
def test_with_global_scope_a_mesh_equals_one_device(
    parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    mesh = program({"fp8_amax_scope": "global"}, parallel, train=train)
    assert_alike(gradients(mesh), on_one_device("global", 2))


def test_with_experts_in_fp8_a_mesh_equals_one_device() -> None:
    model = {
        "num_layers": 1,
        "num_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "moe_aux_loss_coeff": 0.05,
    }
    others = ["attention/output", "attention/qkv", "moe/shared/down", "moe/shared/up"]
    assert program({}, model=model).plan.fp8.products == others
    precision, mesh = {"fp8_amax_scope": "global", "fp8_experts": True}, {"expert": 2, "tensor": 2}
    one = program(precision, model=model)
    assert one.plan.fp8.products == sorted([*others, "moe/experts/down", "moe/experts/up"])
    assert_alike(gradients(program(precision, mesh, model=model)), gradients(one))


def test_with_tensor_scope_tensor_parallelism_alone_equals_one_device() -> None:
    assert_alike(gradients(program({}, {"tensor": 2})), on_one_device("tensor", 1))


def test_fp8_changes_gradients_by_its_rounding_alone() -> None:
    exact, fp8 = on_one_device("none", 1)[0], on_one_device("tensor", 1)[0]
    assert fp8[0] != exact[0]
    np.testing.assert_allclose(fp8[0], exact[0], rtol=1e-3)
    up = [g[1]["layers"]["mlp"]["up"] for g in (fp8, exact)]
    assert 1e-2 < np.linalg.norm(up[0] - up[1]) / np.linalg.norm(up[1]) < 0.2


def test_the_loss_falls_as_in_fp32() -> None:
    losses = {}
    for fp8 in (None, "current"):
        p = program(
            {"fp8": fp8},
            train={"steps": 8, "layer_loop": "scan"},
            optimizer={"name": "adamw", "lr": 3e-3, "min_lr": 3e-3},
        )
        state, batch = initial_state(p), rows_of(p, make_batch(p.config, ragged=False))
        for _ in range(8):
            state, metrics = p.train_step(state, batch)
        losses[fp8] = float(metrics["loss"])
    assert losses["current"] < 3.9
    assert losses["current"] == pytest.approx(losses[None], rel=0.02)


def products(p: Program) -> list[set[str]]:
    """Names of the FP8 weights of every layer."""
    found: list[set[str]] = []

    def local(params: Any) -> Any:
        layers = p.plan.copies(params)["layers"]
        for layer in layers:
            leaves = jax.tree_util.tree_leaves_with_path(layer, is_leaf=is_fp8)
            names = {
                jax.tree_util.keystr(path, simple=True, separator="/")
                for path, leaf in leaves
                if is_fp8(leaf)
            }
            found.append(names)
        return 0

    shapes = jax.eval_shape(p.init_state)["params"]
    jax.eval_shape(p.manual(local, (p.specs,), jax.sharding.PartitionSpec()), shapes)
    return found


ALL = {"attention/query", "attention/key_value", "attention/output", "mlp/up", "mlp/down"}


def test_first_and_last_layers_and_single_products_stay_out() -> None:
    p = program(
        {
            "first_last_layers_bf16": True,
            "num_layers_at_end_in_bf16": 2,
            "fp8_exceptions": ["*/mlp/down", "2/attention/qkv"],
        },
        model={"num_layers": 5},
        train={"layer_loop": "auto"},
    )
    most = ALL - {"mlp/down"}
    assert products(p) == [
        set(),
        most,
        most - {"attention/query", "attention/key_value"},
        set(),
        set(),
    ]


def test_exceptions_of_all_layers_leave_the_exact_gradient_of_those_products() -> None:
    everything_but_down = ["*/attention/*", "*/mlp/up"]
    exact = on_one_device("none", 1)[0]
    mixed = gradients(program({"fp8_exceptions": everything_but_down}))[0]
    assert mixed[0] != exact[0]
    np.testing.assert_allclose(mixed[0], exact[0], rtol=1e-4)


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_weights_are_gathered_in_fp8(level: str) -> None:
    p = program({}, {"fsdp": 4, "data_sharding": level}, train={"layer_loop": "unroll"})
    state, batch = p.abstract_state(), rows_of(p, make_batch(p.config))
    text = p.train_step.lower(state, batch).as_text()
    gathered = re.findall(r"all_gather.*?\(tensor<([\dx]+)x(\w+)>\) -> ", text, re.S)
    sizes = {dtype: 0 for _, dtype in gathered}
    for shape, dtype in gathered:
        sizes[dtype] += int(np.prod([int(n) for n in shape.split("x")]))
    products_size = 2 * (64 * (64 + 2 * 2 * 8) + 64 * 64 + 3 * 64 * 128) // 4
    passes = 2 if level == "optim_grads_params" else 1
    assert sizes["ui8"] == passes * products_size
    assert sizes["f32"] == 2 * 104 * 64 // 4  # embedding and output layer


def test_scopes_reduce_over_the_axes_that_split_the_operands() -> None:
    axes = {
        scope: {
            name: (site.input_axes, site.gradient_axes)
            for name, site in program(
                {"fp8_amax_scope": scope}, {"data": 2, "fsdp": 2, "tensor": 2}
            ).plan.fp8.sites.items()
        }
        for scope in ("tensor", "global")
    }
    assert axes["tensor"]["mlp/up"] == ((), ("tensor",))
    assert axes["tensor"]["mlp/down"] == (("tensor",), ())
    assert axes["tensor"]["attention/query"] == ((), ("tensor",))
    assert axes["tensor"]["attention/output"] == (("tensor",), ())
    assert axes["global"]["mlp/up"] == (("data", "fsdp"), ("data", "fsdp", "tensor"))


def test_training_steps_run_on_a_mesh_with_replicas_alike() -> None:
    p = program({}, {"fsdp": 2, "tensor": 2, "data_sharding": "optim_grads"})
    state = initial_state(p)
    for step in range(2):
        state, metrics = p.train_step(state, rows_of(p, make_batch(p.config, step)))
    assert_replicas_equal(state)
    assert np.isfinite(float(metrics["grad_norm"]))


@pytest.mark.parametrize(
    ("precision", "sections", "message"),
    [
        ({"fp8": "mxfp8"}, {}, "mxfp8.*Blackwell"),
        ({"fp8": "nvfp4"}, {}, "nvfp4.*Blackwell"),
        ({"compute": "fp16"}, {}, "precision.compute to bf16"),
        ({"fp8": "blockwise"}, {}, "blockwise.*slower than bf16.*to current or delayed"),
        ({"fp8_backend": "te"}, {}, "te.*GPUs alone.*precision.fp8_backend to auto"),
        (
            {"first_last_layers_bf16": True},
            {},
            "1 \\+ 1 layers in bf16, which is all 2",
        ),
        (
            {
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": 0,
            },
            {},
            "in_bf16 are 0: set one of them",
        ),
        ({"fp8_exceptions": ["*/mlp/gate"]}, {}, "'\\*/mlp/gate' names no product.*mlp/up"),
        ({"fp8_exceptions": ["*/*"]}, {}, "leave no product in FP8"),
        (
            {"fp8_exceptions": ["1/mlp/up"]},
            {"train": {"layer_loop": "scan"}},
            "train.layer_loop to unroll",
        ),
        (
            {"fp8_exceptions": ["1/mlp/up"]},
            {"parallel": {"pipeline": 2}, "train": {"layer_loop": "unroll"}},
            "parallel.pipeline is 2, and all stages run one program",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    precision: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        program(precision, **sections)


def test_who_multiplies_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level("INFO"):
        program({})
    assert "fp8 products: xla (auto: XLA's products add" in caplog.text
    assert "a CPU multiplies the same values in fp32" in caplog.text


def test_transformer_engine_is_refused_where_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match="cannot be imported.*install.*fp8_backend to auto"):
        require_transformer_engine("gpu")


def test_transformer_engine_refuses_sums_that_cublaslt_cannot_take() -> None:
    a, b = jnp.zeros((32, 24), E4M3), jnp.zeros((16, 24), E4M3)
    with pytest.raises(ConfigError, match="multiples of 16.* 24 elements.*fp8_backend to auto"):
        fp8_te.matmul(a, b, jnp.ones(()), jnp.ones(()), jnp.bfloat16, precise=True)


def test_a_gpu_without_fp8_is_refused() -> None:
    from types import SimpleNamespace

    from jaxtron.precision.checks import check_device

    ampere = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A100")
    config = make_config(precision={"fp8": "current"}).precision
    with pytest.raises(ConfigError, match="A100 .*8.0.* no FP8 tensor cores"):
        check_device(config, ampere)
    check_device(config, SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind=""))
