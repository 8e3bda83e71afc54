"""The executor's table, from its rows alone."""

import pytest

from jaxtron.parallel.pipeline.layout import place_layers
from jaxtron.parallel.pipeline.registry import SCHEDULES
from jaxtron.parallel.pipeline.table import programs, tick_table


@pytest.mark.parametrize(
    "name, stages, chunks, microbatches, layout",
    [
        ("gpipe", 4, 1, 6, None),
        ("1f1b", 4, 1, 6, None),
        ("1f1b", 2, 1, 1, None),
        ("1f1b", 4, 1, 6, "Et*3|t*2|t|t*2L"),
        ("interleaved", 2, 2, 4, None),
        ("interleaved", 4, 2, 8, None),
    ],
)
def test_a_backward_reads_what_the_last_forward_into_its_slot_wrote(
    name: str, stages: int, chunks: int, microbatches: int, layout: str | None
) -> None:
    """Without a unit too: a forward without one writes residuals of garbage, which are finite."""
    placement = place_layers(8, stages, chunks, layout)
    schedule = SCHEDULES[name](stages, chunks, microbatches)
    table = tick_table(schedule, programs(placement))
    idle = 0
    for stage in range(stages):
        content: dict[int, tuple[int, int]] = {}
        for t, row in enumerate(schedule.ticks):
            own = {k: v[t, stage] for k, v in table.items() if v.ndim > 1}
            if any(cell.forward is not None for cell in row):
                content[int(own["f_slot"])] = (own["f_stretch"], own["f_microbatch"])
            if any(cell.backward is not None for cell in row):
                found = content[int(own["b_slot"])]
                assert found == (own["b_stretch"], own["b_microbatch"])
                idle += not own["b_works"]
                assert own["b_works"] == (row[stage].backward is not None)
    assert idle > 0
