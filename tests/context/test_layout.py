"""Which tokens lie where on the context axis, against orders written out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.parallel.context.layout import ContextLayout

# 16 tokens
BY_HAND = {
    # two chunks of 4 a member: 0 with 3, 1 with 2
    (2, 1): [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]],
    # two chunks of 2 a member: 0 with 7, 1 with 6, 2 with 5, 3 with 4
    (4, 1): [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
    # halves of 8, each cut for the two members that exchange heads
    (1, 2): [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    # chunks as for a ring of 2, each cut in two
    (2, 2): [[0, 1, 12, 13], [2, 3, 14, 15], [4, 5, 8, 9], [6, 7, 10, 11]],
    (1, 1): [list(range(16))],
}


@pytest.mark.parametrize(("ring", "all_to_all"), BY_HAND)
def test_members_hold_the_tokens_written_out_by_hand(ring: int, all_to_all: int) -> None:
    layout = ContextLayout(ring, all_to_all)
    expected = np.array(BY_HAND[ring, all_to_all])
    np.testing.assert_array_equal(layout.order(16).reshape(layout.size, -1), expected)
    for member in range(layout.size):
        own = layout.positions(16, jnp.int32(member))
        np.testing.assert_array_equal(own, expected[member])
        listed = [p for run in layout.spans(16, member) for p in run]
        assert listed == expected[member].tolist()


@pytest.mark.parametrize(("ring", "all_to_all"), [(2, 1), (4, 1), (8, 1), (3, 2), (4, 4)])
def test_every_token_has_one_place_and_members_of_a_ring_see_equally_many_keys(
    ring: int, all_to_all: int
) -> None:
    layout, length = ContextLayout(ring, all_to_all), 96 * ring
    order = layout.order(length)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    by_ring_member = order.reshape(ring, -1)
    # the token at position p sees p + 1 keys
    assert len({int(np.sum(own + 1)) for own in by_ring_member}) == 1


def test_members_that_exchange_heads_are_neighbours_and_the_ring_goes_across() -> None:
    layout = ContextLayout(3, 2)
    assert layout.head_groups() == [[0, 1], [2, 3], [4, 5]]
    assert layout.next_in_ring() == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)]
