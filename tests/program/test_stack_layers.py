"""Gradients of few layers are stacked in pieces: the numbers are those of ``numpy.stack``."""

import jax
import numpy as np
import pytest

from jaxtron.parallel.microbatches import stack_layers


@pytest.mark.parametrize("shape", [(8, 3), (6, 2, 2), (5, 2), (7,), ()], ids=str)
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_the_numbers_are_those_of_a_stack(layers: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for _ in range(layers)]
    np.testing.assert_array_equal(jax.jit(stack_layers)(*arrays), np.stack(arrays))


@pytest.mark.parametrize(("layers", "operands"), [(2, 8), (3, 6), (4, 8)])
def test_more_than_four_arrays_are_concatenated(layers: int, operands: int) -> None:
    text = str(jax.make_jaxpr(stack_layers)(*[np.zeros((8, 2), np.float32)] * layers))
    (line,) = [line for line in text.splitlines() if "concatenate" in line]
    assert len(line.split("] ")[-1].split()) == operands
