"""Experts add their weights' gradients to the step's sums themselves, in an unrolled layer loop."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.layers.moe.experts import Experts
from jaxtron.layers.transformer_layer import TransformerLayer
from jaxtron.models.decoder import Decoder
from jaxtron.program import Program
from tests.moe.arms import T_MOE
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.additions import additions
from tests.program.forward import random_params

BOTH = ("layers/moe/experts/up", "layers/moe/experts/down")
OTHERS = ("embedding/word", "output/weight")


def config_of(microbatches: int = 2, **sections: Any) -> Any:
    return make_config(
        model={**T_MOE, **sections.pop("model", {})},
        train={
            "layer_loop": "unroll",
            "global_batch_size": 12,
            "num_microbatches": microbatches,
            **sections.pop("train", {}),
        },
        **sections,
    )


def devices_of(config: Any) -> Any:
    axes = ("data", "fsdp", "expert", "tensor", "pipeline")
    sizes = [getattr(config.parallel, axis) or 1 for axis in axes]
    return jax.devices()[: int(np.prod(sizes))]


@pytest.mark.parametrize(
    ("changes", "summed"),
    [
        ({}, (*OTHERS, *BOTH)),
        ({"train": {"layer_loop": "scan"}}, OTHERS),
        ({"parallel": {"fsdp": 2, "data_sharding": "optim"}}, (*OTHERS, *BOTH)),
        ({"parallel": {"fsdp": 2, "data_sharding": "optim_grads"}}, ()),
        ({"precision": {"grads": "bf16"}}, ()),
        ({"model": {"mtp_num_layers": 1}}, BOTH),
        ({"model": {"untie_embeddings_and_output_weights": False}}, BOTH),
        (
            {"model": {"moe_layer_freq": 2}},
            (*OTHERS, "layers/layer_0/moe/experts/up", "layers/layer_0/moe/experts/down"),
        ),
    ],
    ids=str,
)
def test_which_gradients_are_sums(changes: dict[str, Any], summed: tuple[str, ...]) -> None:
    config = config_of(**changes)
    program = Program(config, devices_of(config))
    assert sorted(program.plan.summed) == sorted(summed)


class AddsNothingItself(Decoder):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sums_itself = ()


def gradients(config: Any, model: Any) -> dict[str, np.ndarray]:
    program = Program(config, devices_of(config), model=model(config.model))
    params = jax.device_put(random_params(program), program.state_shardings["params"])
    batch = rows_of(program, make_batch(config))
    _, _, grads = jax.jit(program.loss_and_gradients)(params, batch)
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, params)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize(
    ("microbatches", "changes"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"parallel": {"data": 2, "expert": 2}}),
        (2, {"parallel": {"expert": 2, "tensor": 2, "fsdp": 1}}),
        (3, {"parallel": {"fsdp": 2, "data_sharding": "optim"}}),
        (2, {"parallel": {"pipeline": 2}}),
        (3, {"train": {"recompute": "full"}}),
        (
            3,
            {
                "train": {
                    "recompute": "full",
                    "recompute_method": "block",
                    "recompute_num_layers": 1,
                }
            },
        ),
        (
            3,
            {
                "train": {
                    "recompute": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 2,
                },
                "model": {"num_layers": 3},
            },
        ),
        (3, {"train": {"recompute": {"mlp_up": "recompute"}}}),
        (2, {"model": {"moe_layer_freq": 2}}),
        (2, {"model": {"moe_expert_capacity_factor": 1.0}}),
        (2, {"precision": {"fp8": "current", "fp8_experts": True}}),
    ],
    ids=str,
)
def test_all_gradients_are_those_of_sums_outside(
    microbatches: int, changes: dict[str, Any]
) -> None:
    config = config_of(microbatches, **changes)
    actual, expected = gradients(config, Decoder), gradients(config, AddsNothingItself)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.max(np.abs(value))
        assert scale > 0, name
        np.testing.assert_allclose(actual[name], value, rtol=0, atol=2e-6 * scale, err_msg=name)


def test_each_layer_adds_once_and_only_in_its_kernel() -> None:
    """Which adds to matrices ``[experts, K, N]``: nothing is added to ``[experts, h, 2, F]``."""
    config = config_of(3, train={"recompute": "full"})
    program = Program(config, jax.devices()[:1])
    batch = rows_of(program, make_batch(config))
    traced = jax.make_jaxpr(program.loss_and_gradients)(random_params(program), batch).jaxpr
    assert additions(traced, (8, 32, 2, 16)) == 0
    assert additions(traced, (8, 32, 32)) == config.model.num_layers


class TwiceUsed(Experts):
    def __call__(self, *arguments: Any) -> Any:
        return super().__call__(*arguments) + super().__call__(*arguments)


class Unused(Experts):
    def __call__(self, rows: Any, *arguments: Any) -> Any:
        return rows


class LayersRunTwice(Decoder):
    def run_layers(self, layers: Any, fetch: Any, x: Any, *arguments: Any) -> Any:
        x = super().run_layers(layers, fetch, x, *arguments).x
        return super().run_layers(layers, fetch, x, *arguments)


def decoder_with(experts: Any) -> Any:
    class Layer(TransformerLayer):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.moe.experts.__class__ = experts

    class Model(Decoder):
        layer_class = Layer

    return Model


@pytest.mark.parametrize(
    ("model", "count"),
    [(decoder_with(TwiceUsed), 2), (decoder_with(Unused), 0), (LayersRunTwice, 2)],
    ids=["twice", "unused", "layers twice"],
)
def test_a_model_that_uses_an_experts_weight_otherwise_is_refused(model: Any, count: int) -> None:
    config = config_of()
    program = Program(config, jax.devices()[:1], model=model(config.model))
    batch = rows_of(program, make_batch(config))
    message = f"sums_itself names layers/moe/experts/(up|down).* and {count} do"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(program.loss_and_gradients, random_params(program), batch)


def test_a_name_without_a_weight_is_refused() -> None:
    class Misnamed(Decoder):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.sums_itself = ("layers/moe/expert/up",)

    config = config_of()
    program = Program(config, jax.devices()[:1], model=Misnamed(config.model))
    batch = rows_of(program, make_batch(config))
    with pytest.raises(ValueError, match="names layers/moe/expert/up, but it has no such weight"):
        jax.eval_shape(program.loss_and_gradients, random_params(program), batch)
