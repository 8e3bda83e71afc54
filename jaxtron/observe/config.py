"""Configuration of what a run records about itself."""

from typing import Annotated, Literal

from pydantic import Field

from jaxtron.config.fields import key, refuse_url, section
from jaxtron.errors import ConfigError

CONFIG_FILE = "config.yaml"
"""The resolved configuration, in the run's folder."""


@section
class ObserveConfig:
    """Metrics, log lines, traces and where they go."""

    dir: str | None = key(
        None, "Folder for metrics.jsonl, config.yaml, TensorBoard and traces; null: no files."
    )
    log_interval: int = key(1, "Steps between log lines; metrics.jsonl has every step.", ge=1)
    tensorboard: bool = key(True, "Write TensorBoard events to `dir`/tensorboard.")
    profile_steps: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = key(
        None, "[first, last]: trace these steps with the JAX profiler into `dir`/profile."
    )
    progress: Literal["auto", "on", "off"] = key(
        "auto", "Progress bar on stderr; auto: when stderr is a terminal."
    )
    peak_tflops: float | None = key(
        None, "Peak of one device for MFU [TFLOP/s]; null: known GPUs' dense bf16 peak.", gt=0
    )

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work.

        Raises:
            ConfigError: ``profile_steps`` runs backwards or has no folder; ``dir`` is a URL.
        """
        refuse_url("observe.dir", self.dir)
        if self.profile_steps is None:
            return
        first, last = self.profile_steps
        if first > last:
            raise ConfigError(
                f"observe.profile_steps is [{first}, {last}]: the first step comes after the last; "
                f"write [{last}, {first}]"
            )
        if self.dir is None:
            raise ConfigError(
                f"observe.profile_steps is [{first}, {last}] but observe.dir is null: a trace "
                "needs a folder; set observe.dir"
            )
