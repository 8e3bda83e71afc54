"""Configuration of where a run's state is saved, how often, and where a run starts from."""

from jaxtron.config.fields import key, refuse_url, section
from jaxtron.config.yaml_io import spelled
from jaxtron.errors import ConfigError


@section
class CheckpointConfig:
    """Saving the run's state, resuming it, and starting from another run's weights."""

    dir: str | None = key(
        None,
        "Folder of this run's checkpoints, seen by every process; a relaunch resumes from its "
        "newest complete step. null: nothing is saved.",
    )
    load: str | None = key(
        None,
        "Checkpoint folder (or one step's folder) a new run starts from; not read again once `dir` "
        "holds this run's own checkpoints.",
    )
    load_step: int | None = key(None, "Step to take from `load`; null: its newest.", ge=0)
    interval: int = key(0, "Steps between saves; 0: only at the end of the run.", ge=0)
    keep: int | None = key(3, "Newest checkpoints kept in `dir`; null: all.", ge=1)
    save_retain_interval: int | None = key(
        None, "Steps divisible by this are kept beyond `keep`; null: none.", ge=1
    )
    async_save: bool = key(
        True, "Write in the background, from one host copy of this process's share of the state."
    )
    timeout_s: int = key(
        3600, "A save that takes longer than this in the background has failed [s].", ge=1
    )
    no_save_optim: bool = key(False, "Leave the optimizer state out of checkpoints.")
    no_load_optim: bool = key(
        False, "Start from the weights and step of `load` with a fresh optimizer state."
    )
    finetune: bool = key(
        False, "Start from the weights of `load` alone: fresh optimizer, step and data position."
    )
    moe_use_upcycling: bool = key(
        False,
        "`load` holds a dense model: start from its weights alone, every expert a copy of its "
        "layer's MLP, with new routers.",
    )
    verify: bool = key(True, "Recompute every array's digest after loading and compare.")
    file_checksums: bool = key(
        True, "Read each file back after writing and store its CRC-32 for `checkpoint verify`."
    )

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work.

        Raises:
            ConfigError: a key that depends on another is set without it, or a folder is a URL.
        """
        for name in ("dir", "load"):
            refuse_url(f"checkpoint.{name}", getattr(self, name))
        for name in ("load_step", "no_load_optim", "finetune", "moe_use_upcycling"):
            value = getattr(self, name)
            if self.load is None and value is not None and value is not False:
                raise ConfigError(
                    f"checkpoint.{name} is {spelled(value)} but checkpoint.load is null: it says "
                    "what to take from checkpoint.load, so set that to the checkpoint folder to "
                    "start from"
                )
        if self.interval and self.dir is None:
            raise ConfigError(
                f"checkpoint.interval is {self.interval} but checkpoint.dir is null: set "
                "checkpoint.dir to the folder that checkpoints go to, or interval to 0"
            )
