"""TensorBoard events of a run's scalars."""

from collections.abc import Mapping
from pathlib import Path

from tensorboardX import FileWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxtron.observe.records import Scalar


class ScalarEvents:
    """Appends scalars to a TensorBoard folder, all of a step in one event.

    Every start of a run adds a file. Its first event tells TensorBoard to hide what earlier files
    hold from ``start_step + 1`` on, so that steps trained again are shown once.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        """Open a new file of events in ``folder`` for the steps after ``start_step``."""
        self._writer = FileWriter(str(folder), flush_secs=10)
        start = Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))
        self._writer.add_event(start, start.step)

    def write(self, step: int, record: Mapping[str, Scalar]) -> None:
        """Write the record's figures under their keys; those that do not exist (None) are left out.

        Args:
            step: training steps done.
            record: key -> figure; ``step`` itself is not written.
        """
        values = [
            Summary.Value(tag=key, simple_value=value)
            for key, value in record.items()
            if key != "step" and value is not None
        ]
        self._writer.add_summary(Summary(value=values), step)

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._writer.close()
