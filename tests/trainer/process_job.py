"""What each of two processes with four CPU devices does: ``STAGE FOLDER`` (see test_processes)."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax

from jaxtron.cli import run
from jaxtron.config.load import load_config
from jaxtron.launch.config import RuntimeConfig
from jaxtron.launch.initialize import launch, shutdown
from jaxtron.train import main as train_main
from jaxtron.trainer import Trainer
from tests.trainer.runs import raw_config

RUNTIME: dict[str, Any] = {"cpu_devices": 4, "heartbeat_timeout_s": 20}
# Two microbatches of four rows, of which each process holds two.
SHARDED: dict[str, Any] = {
    "parallel": {"fsdp": 4, "tensor": 2, "tp_comm_overlap": True},
    "train": {"num_microbatches": 2},
}
REPLICATED: dict[str, Any] = {
    "parallel": {"data": 2, "fsdp": 4, "data_sharding": "optim_grads_params"}
}


class CountingRows:
    """Notes which rows are read."""

    def __init__(self, dataset: Any) -> None:
        self.name = dataset.name
        self.read: set[int] = set()
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self.read.add(index)
        return self._dataset[index]


def train(folder: Path, **train_section: Any) -> None:
    """Train on the sharded mesh; print which rows this process has read."""
    sections = {**SHARDED, "train": {**SHARDED["train"], **train_section}}
    evaluation = {"interval": 3, "iters": 1}
    trainer = Trainer(load_config(raw_config(folder, **sections, eval=evaluation)))
    rows = CountingRows(trainer.datasets.train)
    trainer.datasets = dataclasses.replace(trainer.datasets, train=rows)
    trainer.fit()
    print(f"read {sorted(rows.read)}", flush=True)


def main() -> None:
    stage, folder = sys.argv[1], Path(sys.argv[2])
    launch(RuntimeConfig(**RUNTIME))
    assert (jax.process_count(), len(jax.local_devices())) == (2, 4)
    if stage == "start":
        train(folder, exit_interval=3)
        shutdown()
    else:
        train(folder)
        # The verb, on data that process 1 alone cannot read to the end.
        raise SystemExit(run(train_main, ["--config", str(folder / "broken.yaml")]))


if __name__ == "__main__":
    main()
