"""Documents packed in one row do not see each other, through the whole model (O07)."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtron.data.masks import RowFormat
from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, make_config, rows_of
from tests.program.forward import logits, random_params

EOD, SEQ = 99, 16
FIRST = [5, 6, 11, 3, EOD]  # the end-of-document token belongs to the document that it ends
SECOND = [7, 8, 9, 42, 17, 60, EOD]
BOTH = slice(len(FIRST), len(FIRST) + len(SECOND))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tensor 2": {"tensor": 2},
    "all_to_all 2": {"context": 2, "context_strategy": "all_to_all"},
    "ring 4": {"context": 4, "context_strategy": "ring"},
}


def program_for(
    parallel: dict[str, Any] | None = None,
    mask: bool = True,
    positions: bool = True,
    **model: Any,
) -> Program:
    parallel = parallel or {}
    config = make_config(
        model={"num_layers": 2, **model},
        parallel=parallel,
        data={
            "eod_token": EOD,
            "reset_attention_mask": mask,
            "reset_position_ids": positions,
        },
        train={"global_batch_size": 1},
    )
    devices = parallel.get("tensor", 1) * parallel.get("context", 1)
    return Program(config, jax.devices()[:devices])


def batch_of(program: Program, *documents: list[int]) -> dict[str, np.ndarray]:
    """One row: the documents, then padding without loss."""
    data = program.config.data
    row_format = RowFormat(
        eod=EOD,
        reset_attention_mask=data.reset_attention_mask,
        reset_position_ids=data.reset_position_ids,
    )
    text = [token for document in documents for token in document]
    length = len(text)
    text = text + [1] * (SEQ + 1 - length)
    row = row_format.row(np.array(text))
    row["loss_mask"][length:] = 0
    return {name: array[None] for name, array in row.items()}


@pytest.mark.parametrize(
    ("positions", "layout"),
    [
        ("rope", "one device"),
        ("learned_absolute", "one device"),
        ("rope", "tensor 2"),
        ("rope", "all_to_all 2"),
        ("learned_absolute", "ring 4"),
    ],
)
def test_packed_document_has_the_logits_it_has_alone(positions: str, layout: str) -> None:
    program = program_for(LAYOUTS[layout], position_embedding_type=positions)
    params = random_params(program)
    packed = logits(program, params, batch_of(program, FIRST, SECOND))[0, BOTH]
    alone = logits(program, params, batch_of(program, SECOND))[0, : len(SECOND)]
    assert np.abs(packed).max() > 1
    np.testing.assert_allclose(packed, alone, atol=1e-5)
    other = batch_of(program, [50, 51, 52, 53, EOD], SECOND)
    np.testing.assert_array_equal(logits(program, params, other)[0, BOTH], packed)


def test_mask_reset_alone_blocks_and_leaves_positions_running() -> None:
    program = program_for(positions=False, position_embedding_type="learned_absolute")
    params = random_params(program)
    packed = logits(program, params, batch_of(program, FIRST, SECOND))[0, BOTH]
    other = batch_of(program, [50, 51, 52, 53, EOD], SECOND)
    assert "position_ids" not in other
    np.testing.assert_array_equal(logits(program, params, other)[0, BOTH], packed)
    alone = logits(program, params, batch_of(program, SECOND))[0, : len(SECOND)]
    assert np.abs(packed - alone).max() > 0.1  # positions 5, 6, ... instead of 0, 1, ...


def test_position_reset_alone_does_not_block() -> None:
    program = program_for(mask=False)
    params = random_params(program)
    packed = logits(program, params, batch_of(program, FIRST, SECOND))[0, BOTH]
    other = batch_of(program, [50, 51, 52, 53, EOD], SECOND)
    assert "segment_ids" not in other
    assert np.abs(logits(program, params, other)[0, BOTH] - packed).max() > 0.1


def test_gradient_of_a_packed_row_is_the_sum_of_its_documents() -> None:
    program = program_for()
    params = random_params(program)
    gradients = jax.jit(program.loss_and_gradients)

    def total(*documents: list[int]) -> tuple[float, Any]:
        """Loss and gradients summed over tokens. A document's last label is the next one's."""
        batch = batch_of(program, *documents)
        batch["labels"] = (batch["tokens"] + 1) % 100
        loss, tokens, grads = gradients(params, rows_of(program, batch))
        assert int(tokens) == sum(map(len, documents))
        scale = int(tokens)
        return float(loss) * scale, jax.tree.map(lambda g: np.asarray(g) * scale, grads)

    loss, grads = total(FIRST, SECOND)
    first, second = total(FIRST), total(SECOND)
    np.testing.assert_allclose(loss, first[0] + second[0], rtol=1e-6)
    expected = jax.tree.map(np.add, first[1], second[1])
    assert_close_leaves(grads, expected, 1e-5, "gradient")
