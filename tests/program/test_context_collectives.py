"""Each context strategy moves what it says, and no more than a backward pass needs."""

from typing import Any

import jax
import pytest

from jaxtron.program import Program
from tests.parity.harness import make_batch, make_config, rows_of
from tests.program.collectives import collectives, count

NAMES = ("all_gather", "reduce_scatter", "all_to_all", "collective_permute")
HIERARCHICAL = {"context_strategy": "hierarchical", "context_all_to_all": 2}

# Per layer, with 4 members. ring: 3 sends of k and v in each pass, and 4 of dk and dv.
# all_gather: k and v in each pass, and one sum each of dk and dv. all_to_all: q, k, v and the
# output, and their transposes. hierarchical: a ring of 2 (1 send of two, 1 of two, 2 of two).
PER_LAYER: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "ring": ({"context_strategy": "ring"}, (0, 0, 0, 6 + 6 + 8)),
    "all_gather": ({}, (4, 2, 0, 0)),
    "all_to_all": ({"context_strategy": "all_to_all"}, (0, 0, 8, 0)),
    "hierarchical": (HIERARCHICAL, (0, 0, 8, 2 + 2 + 4)),
}


def moved(parallel: dict[str, Any], **train: Any) -> tuple[int, ...]:
    """Collectives of a step's loss and gradients with two layers and no sharded state."""
    config = make_config(
        model={"num_layers": 2, "num_query_groups": 8},
        parallel={"context": 4, "data_sharding": "no_shard", **parallel},
        train={"layer_loop": "unroll", **train},
    )
    program = Program(config, jax.devices()[:4])
    params = program.abstract_state()["params"]
    batch = rows_of(program, make_batch(config))
    found = collectives(jax.jit(program.loss_and_gradients).lower(params, batch))
    return tuple(sum(count(found, name).values()) for name in NAMES)


@pytest.mark.parametrize("strategy", PER_LAYER)
def test_strategy_moves_what_it_says(strategy: str) -> None:
    parallel, per_layer = PER_LAYER[strategy]
    assert moved(parallel) == tuple(2 * n for n in per_layer)


def test_saved_attention_is_not_passed_around_again() -> None:
    """``core_attn`` names the merged output and its statistics, which the backward pass reads."""
    ring = {"context_strategy": "ring"}
    saved = moved(ring, recompute={"core_attn": "save", "mlp_act": "recompute"})
    again = moved(ring, recompute={"core_attn": "recompute"})
    assert saved == moved(ring)
    assert again[3] == saved[3] + 2 * 6
