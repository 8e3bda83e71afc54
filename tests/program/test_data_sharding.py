"""What each level of ``parallel.data_sharding`` stores, keeps while it computes, and communicates.

P parameters, d data shards; bytes are those of Rajbhandari et al. 2020, arXiv:1910.02054, for fp32
master weights with AdamW. Where collectives stand is read from StableHLO: loop 1 is the loop over
microbatches, loop 2 the loop over layers.
"""

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.program import Program
from tests.parity.harness import make_config
from tests.program.collectives import collectives, count
from tests.program.scans import scans

ADAMW = {"name": "adamw"}
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MATRICES = 7  # embedding, query, key_value, output, up, down; output layer
LAYER_MATRICES = 5


def parameters(model: Any) -> tuple[int, int]:
    """Parameters in matrices and in norm weights of an untied Llama-style model."""
    h, d = model.hidden_size, model.hidden_size // model.num_attention_heads
    attention = 2 * h * model.num_attention_heads * d + 2 * h * model.num_query_groups * d
    layer = attention + 3 * h * model.ffn_hidden_size
    matrices = 2 * model.padded_vocab_size * h + model.num_layers * layer
    return matrices, (2 * model.num_layers + 1) * h


def abstract_batch(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    layout = program.batch_layout
    shape = (
        layout.num_microbatches,
        layout.rows_per_microbatch,
        program.config.data.seq_length,
    )
    dtypes = {"tokens": np.int32, "labels": np.int32, "loss_mask": np.float32}
    sharding = program.placement.sharding
    return {k: jax.ShapeDtypeStruct(shape, d, sharding=sharding) for k, d in dtypes.items()}


def lower(config: Any) -> Any:
    program = Program(config)
    return program.train_step.lower(program.abstract_state(), abstract_batch(program))


@pytest.mark.parametrize("parallel", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 8}])
@pytest.mark.parametrize("level", LEVELS)
def test_stored_bytes_per_device(level: str, parallel: dict[str, int]) -> None:
    # no group is replicated at tensor 2: every matrix is split over tensor
    parallel = {"fsdp": 1, **parallel}
    program = Program(make_config(parallel={**parallel, "data_sharding": level}, optimizer=ADAMW))
    state = jax.tree.map(
        lambda s: jax.make_array_from_callback(
            s.shape, s.sharding, lambda i, s=s: np.zeros(s.sharding.shard_shape(s.shape), s.dtype)
        ),
        program.abstract_state(),
    )
    matrices, vectors = parameters(program.config.model)
    split = parallel.get("tensor", 1) * (1 if level == "no_shard" else parallel["fsdp"])
    expected = 12 * (matrices // split + vectors)  # fp32 weight and two moments
    for device in range(8):
        arrays = [a for a in jax.tree.leaves((state["params"], state["opt_state"])) if a.ndim]
        stored = sum(a.addressable_shards[device].data.nbytes for a in arrays)
        assert stored == expected, f"{level} on device {device}"


def test_initial_state_is_stored_as_declared() -> None:
    """Nothing is replicated on the way from the initialiser."""
    program = Program(
        make_config(
            model={"num_layers": 1},
            parallel={"fsdp": 8, "data_sharding": "optim_grads_params"},
            optimizer=ADAMW,
        )
    )
    state = program.init_state()
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.state_shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    matrix = state["params"]["layers"]["mlp"]["up"]
    assert math.prod(matrix.addressable_shards[0].data.shape) == matrix.size // 8


def test_temporary_bytes_shrink_from_level_to_level() -> None:
    """The compiler has more buffers than the formulas, but none that undoes a level's saving.

    (no_shard holds the same copies and accumulators as optim while it computes. Compiled for a CPU
    16-bit gradients would be exchanged as fp32, of which all parts are kept.)
    """
    temporary: dict[str, float] = {}
    for level in LEVELS[1:]:
        config = make_config(
            model={
                "num_layers": 8,
                "hidden_size": 256,
                "ffn_hidden_size": 512,
                "vocab_size": 1024,
            },
            parallel={
                "fsdp": 8,
                "data_sharding": level,
                "reduce_scatter_with_fp32_accumulation": False,
            },
            train={"num_microbatches": 4},
            precision={"compute": "bf16"},
        )
        analysis = lower(config).compile().memory_analysis()
        temporary[level] = analysis.temp_size_in_bytes / sum(parameters(config.model))
    print({level: round(value, 2) for level, value in temporary.items()}, "bytes a parameter")
    optim, grads, params = temporary.values()
    # Of 4P for fp32 accumulators 4P/8 is left, though a microbatch's own gradients pass through;
    # then of 2P for bf16 copies and as much for those gradients a few layers' are.
    assert optim > grads + 1
    assert grads > params + 3


def step_collectives(level: str, loop: str = "scan", **parallel: Any) -> Any:
    config = make_config(
        model={"num_layers": 3},
        parallel={"fsdp": 8, "data_sharding": level, **parallel},
        train={"num_microbatches": 4, "layer_loop": loop},
        precision={"compute": "bf16"},
    )
    return collectives(lower(config))


def test_no_shard_sums_every_gradient_once_a_step() -> None:
    found = step_collectives("no_shard")
    assert count(found, "all_gather") == {}
    assert count(found, "reduce_scatter") == {}
    # 7 matrices, 2 + 1 norm weights; loss, token count and the number of valid tokens
    assert count(found, "all_reduce") == {0: MATRICES + 3 + 3}


def test_optim_gathers_weights_and_scatters_gradients_once_a_step() -> None:
    found = step_collectives("optim")
    assert count(found, "all_gather") == {0: MATRICES}
    assert count(found, "reduce_scatter") == {0: MATRICES}
    assert count(found, "all_reduce") == {0: 3 + 3}


def test_optim_grads_scatters_gradients_in_every_microbatch() -> None:
    found = step_collectives("optim_grads")
    assert count(found, "all_gather") == {0: MATRICES}
    assert count(found, "all_to_all") == {1: MATRICES}
    found = step_collectives("optim_grads", reduce_scatter_with_fp32_accumulation=False)
    assert count(found, "reduce_scatter") == {1: MATRICES}


@pytest.mark.parametrize(("reshard", "gathers_a_layer"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_optim_grads_params_gathers_in_the_layer_and_again_in_the_backward(
    loop: str, reshard: bool, gathers_a_layer: int
) -> None:
    found = step_collectives("optim_grads_params", loop, reshard_after_forward=reshard)
    outside = MATRICES - LAYER_MATRICES  # the embedding's and output's backward reads no weight
    if loop == "scan":
        assert count(found, "all_gather") == {1: outside, 2: gathers_a_layer * LAYER_MATRICES}
        assert count(found, "all_to_all") == {1: outside, 2: LAYER_MATRICES}
    else:
        assert count(found, "all_gather") == {1: outside + 3 * gathers_a_layer * LAYER_MATRICES}
        assert count(found, "all_to_all") == {1: outside + 3 * LAYER_MATRICES}


@pytest.mark.parametrize("reshard", [True, False])
def test_the_backward_keeps_weights_of_layers_as_shards_only_when_resharding(reshard: bool) -> None:
    """What a scan over layers hands to the backward pass, apart from activations."""
    config = make_config(
        model={"num_layers": 3},
        parallel={
            "fsdp": 8,
            "data_sharding": "optim_grads_params",
            "reshard_after_forward": reshard,
        },
        precision={"compute": "bf16"},
    )
    program = Program(config)
    rows = program.batch_layout.micro_batch_size
    closed = jax.make_jaxpr(program.loss_and_gradients)(
        program.abstract_state()["params"], abstract_batch(program)
    )
    forward = scans(closed.jaxpr, length=3)[0].stacked
    assert any(aval.shape[1] == rows for aval in forward)  # activations
    kept = sum(math.prod(aval.shape) for aval in forward if aval.shape[1] != rows)
    matrices = parameters(config.model)[0] - 2 * 104 * 64
    if reshard:  # bf16 copies of the shards, and small masks and norms' intermediates
        assert kept < 1.2 * matrices / 8
    else:
        assert kept > 0.99 * matrices


@pytest.mark.parametrize("in_parts", [False, True])
def test_resharding_does_not_gather_the_sequence_again(in_parts: bool) -> None:
    """Sequence parallelism's gathers of activations, or sends, are the same with and without it."""
    found = []
    for level in ("optim", "optim_grads_params"):
        config = make_config(
            model={"num_layers": 3},
            parallel={
                "fsdp": 4,
                "tensor": 2,
                "data_sharding": level,
                "tp_comm_overlap": in_parts,
            },
        )
        found.append(collectives(lower(config)))
    # one microbatch: loop 1 is the loop over layers
    optim, params = (count(each, "all_gather") for each in found)
    assert params[1] == optim.get(1, 0) + 2 * LAYER_MATRICES
    sent, sent_with = (count(each, "collective_permute") for each in found)
    assert sent == sent_with
    assert bool(sent) == in_parts


@pytest.mark.parametrize(
    ("level", "grad_reduce", "dtype"),
    [
        ("optim", "fp32", "f32"),
        ("optim", "bf16", "bf16"),
        ("optim_grads_params", "fp32", "f32"),
    ],
)
def test_gradients_are_summed_in_the_format_asked_for(
    level: str, grad_reduce: str, dtype: str
) -> None:
    config = make_config(
        model={"num_layers": 1},
        parallel={
            "data": 2,
            "fsdp": 4,
            "data_sharding": level,
            "reduce_scatter_with_fp32_accumulation": False,
        },
        precision={"compute": "bf16", "grad_reduce": grad_reduce},
    )
    found = collectives(lower(config))
    assert {key[2] for key in found if key[0] == "all_gather"} == {"bf16"}
    assert {key[2] for key in found if key[0] == "reduce_scatter"} == {dtype}
