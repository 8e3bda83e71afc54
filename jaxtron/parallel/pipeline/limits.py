"""What several schedules refuse alike."""

from jaxtron.errors import ConfigError


def one_chunk(schedule: str, chunks: int) -> None:
    """Refuse virtual stages in a schedule that has none.

    Raises:
        ConfigError: ``chunks`` is not 1.
    """
    if chunks != 1:
        raise ConfigError(
            f"parallel.virtual_pipeline is {chunks}, but parallel.pipeline_schedule {schedule} "
            "runs one chunk of layers on each stage: set parallel.pipeline_schedule to "
            "interleaved, or parallel.virtual_pipeline to 1"
        )
