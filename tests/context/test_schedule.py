"""Schedules of dynamic context parallelism: small ones by hand, large ones by what must hold."""

import numpy as np
import pytest

from jaxtron.errors import ConfigError, DataError
from jaxtron.parallel.context.schedule import (
    CostModel,
    MenuEntry,
    default_menu,
    schedule,
    total_seconds,
)

# Attention costs as much as the rest at 1000 tokens.
COST = CostModel(linear=1e-6, quadratic=1e-9)


def test_the_menu_has_every_power_of_two() -> None:
    assert default_menu(4, 100) == (MenuEntry(1, 100), MenuEntry(2, 200), MenuEntry(4, 400))
    with pytest.raises(ConfigError, match="powers of two.* is 6"):
        default_menu(6, 100)


def test_a_long_document_takes_all_devices_and_short_ones_one_each() -> None:
    # 4 devices of 100 tokens: the document of 400 needs all; the others fill a row each
    cost = CostModel(linear=1e-6, quadratic=1e-9, exchange=1e-7)
    made = schedule(
        [90, 400, 95, 100, 80], menu=default_menu(4, 100), context=4, data_shards=1, cost=cost
    )
    assert [m.entry.degree for m in made] == [4, 1]
    assert made[0].rows == ((1,),)
    # longest first, each to an empty row
    assert made[1].rows == ((3,), (2,), (0,), (4,))
    # 400 tokens on 4 devices: 100 a device, exchanged with 3 others; attention 400^2 shared by 4
    assert made[0].seconds == pytest.approx(100e-6 + 30e-6 + 400**2 * 1e-9 / 4)
    # every row has 100 tokens with its padding; the slowest attends to 100
    assert made[1].seconds == pytest.approx(100e-6 + 100**2 * 1e-9)
    assert total_seconds(made) == pytest.approx(made[0].seconds + made[1].seconds)


def test_a_document_that_fits_one_device_is_spread_when_others_would_idle() -> None:
    # alone, 100 tokens on 1 of 4 devices take 100 us and more; spread over 4 with rows of 100, 25
    menu = (MenuEntry(1, 100), MenuEntry(4, 100))
    [made] = schedule([100], menu=menu, context=4, data_shards=1, cost=COST)
    assert made.entry == MenuEntry(4, 100)
    # unless the exchange costs more than it saves
    dear = CostModel(linear=1e-6, quadratic=1e-9, exchange=1e-5)
    [made] = schedule([100], menu=menu, context=4, data_shards=1, cost=dear)
    assert made.entry == MenuEntry(1, 100)


def test_short_documents_fill_rows_beside_a_long_one_without_slowing_it() -> None:
    # degree 2, two rows of 200: one holds 150; the other takes 90 and 50, whose attention is less
    made = schedule([50, 150, 90], menu=(MenuEntry(2, 200),), context=4, data_shards=1, cost=COST)
    assert [m.rows for m in made] == [((1,), (2, 0))]


def test_a_document_that_would_be_left_over_may_slow_a_row_a_little() -> None:
    # squares 3600, 2500, 1600, 400: an even share is 4050, and beside the 50 the 40 makes 4100
    menu = (MenuEntry(1, 100),)
    [made] = schedule([60, 50, 40, 20], menu=menu, context=2, data_shards=1, cost=COST)
    assert made.rows == ((0, 3), (1, 2))
    assert made.seconds == pytest.approx(100e-6 + 4100 * 1e-9)


def long_tailed(seed: int, count: int) -> list[int]:
    """Log-normal lengths around 2000 tokens, up to 65536."""
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(7.6, 1.2, count)), 16, 65536).astype(int).tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("context", "data_shards"), [(4, 1), (8, 2), (1, 3)])
def test_every_document_is_placed_once_within_memory(
    seed: int, context: int, data_shards: int
) -> None:
    menu = default_menu(context, 65536 // context)
    lengths = long_tailed(seed, 200)
    made = schedule(lengths, menu=menu, context=context, data_shards=data_shards, cost=COST)
    assert sorted(d for m in made for row in m.rows for d in row) == list(range(200))
    for m in made:
        assert m.entry in menu
        assert len(m.rows) == data_shards * context // m.entry.degree
        slowest = max(sum(lengths[d] ** 2 for d in row) for row in m.rows)
        assert all(sum(lengths[d] for d in row) <= m.entry.length for row in m.rows)
        padded = 1e-6 * m.entry.length / m.entry.degree
        assert m.seconds == pytest.approx(padded + 1e-9 * slowest / m.entry.degree)
    # no schedule beats perfect balance without padding
    devices = context * data_shards
    ideal = sum(1e-6 * n + 1e-9 * n * n for n in lengths) / devices
    assert total_seconds(made) >= ideal


@pytest.mark.parametrize("seed", range(3))
def test_the_menu_beats_one_degree_on_a_long_tail_of_lengths(seed: int) -> None:
    lengths = long_tailed(seed, 300)
    cost = CostModel(linear=1e-6, quadratic=1e-10, exchange=1e-7)
    menu = default_menu(8, 8192)
    chosen = schedule(lengths, menu=menu, context=8, data_shards=1, cost=cost)
    static = schedule(lengths, menu=menu[-1:], context=8, data_shards=1, cost=cost)
    assert len({m.entry.degree for m in chosen}) > 1
    assert total_seconds(chosen) < 0.9 * total_seconds(static)


def test_the_schedule_is_the_same_on_every_process() -> None:
    lengths = long_tailed(7, 100)
    menu = default_menu(4, 16384)
    made = [schedule(lengths, menu=menu, context=4, data_shards=2, cost=COST) for _ in range(2)]
    assert made[0] == made[1]


def test_what_no_row_holds_is_refused() -> None:
    menu = default_menu(2, 100)
    with pytest.raises(DataError, match="document 1 has 201 tokens, rows have 1 to 200"):
        schedule([5, 201], menu=menu, context=2, data_shards=1, cost=COST)
    with pytest.raises(ConfigError, match=r"degree 2 does not divide parallel\.context 1"):
        schedule([5], menu=menu, context=1, data_shards=1, cost=COST)
