"""The cut of the global batch into microbatches and data shards."""

import pytest

from jaxtron.config.batch import BatchLayout, batch_layout
from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import AXES


def cut(rows: int, micro: int | None, count: int | None, **axes: int) -> BatchLayout:
    config = load_config(
        {
            "preset": "tiny",
            "train": {
                "global_batch_size": rows,
                "micro_batch_size": micro,
                "num_microbatches": count,
            },
        }
    )
    return batch_layout(config, {axis: axes.get(axis, 1) for axis in AXES})


@pytest.mark.parametrize(
    "rows, micro, count, axes, expected",
    [
        (8, None, None, {}, (8, 1, 1, 1)),
        (8, 2, None, {}, (4, 2, 2, 1)),
        (32, 2, None, {"fsdp": 4}, (4, 8, 2, 4)),
        (32, None, 4, {"fsdp": 4}, (4, 8, 2, 4)),
        (32, 2, 4, {"fsdp": 4}, (4, 8, 2, 4)),
        (32, None, 1, {"data": 2, "fsdp": 2, "expert": 2}, (1, 32, 4, 8)),
        (24, None, 3, {"tensor": 8, "context": 4, "pipeline": 2}, (3, 8, 8, 1)),
    ],
)
def test_microbatches(
    rows: int,
    micro: int | None,
    count: int | None,
    axes: dict[str, int],
    expected: tuple[int, int, int, int],
) -> None:
    layout = cut(rows, micro, count, **axes)
    assert layout == BatchLayout(*expected)
    assert layout.global_batch_size == rows


def test_the_number_of_microbatches_fixes_their_rows_on_every_mesh() -> None:
    rows = {cut(32, None, 4, fsdp=shards).rows_per_microbatch for shards in (1, 2, 4, 8)}
    assert rows == {8}


@pytest.mark.parametrize(
    "rows, micro, count, axes, words",
    [
        (10, 4, None, {}, ["10", "train.micro_batch_size 4", "8 or 12"]),
        (8, 2, None, {"fsdp": 8}, ["8", "× 8 data shards (fsdp 8) = 16", "set", "to 16"]),
        (12, None, 8, {}, ["12", "train.num_microbatches 8", "8 or 16"]),
        (8, None, 2, {"data": 4, "fsdp": 2}, ["data 4 × fsdp 2", "= 16"]),
        (32, 2, 3, {"fsdp": 4}, ["= 24", "32", "only one of the two"]),
        (2, 4, None, {}, ["train.global_batch_size is 2", "to 4"]),
    ],
)
def test_batches_that_do_not_divide(
    rows: int, micro: int | None, count: int | None, axes: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        cut(rows, micro, count, **axes)
    for word in words:
        assert word in str(caught.value)
