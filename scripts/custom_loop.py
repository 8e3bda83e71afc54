"""A training loop of your own on the public API, without the Trainer.

    python scripts/custom_loop.py configs/tiny.yaml train.steps=20 parallel.tensor=2

Takes the same configuration as `python -m jaxtron.train`; saves and logs nothing.
"""

import sys
from collections.abc import Iterator

from jaxtron.config.load import load_config
from jaxtron.data.build import build_datasets
from jaxtron.data.loader import Batch, batches
from jaxtron.data.source import RowDataset
from jaxtron.launch.initialize import launch
from jaxtron.program import Program


def main(source: str, *overrides: str) -> list[float]:
    """Train, evaluate once, and return the loss of every step."""
    config = load_config(source, overrides)
    launch(config.runtime)  # before any use of a device

    steps, batch_size = config.train.steps, config.train.global_batch_size
    program = Program(config)
    datasets = build_datasets(
        config.data,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        train_samples=steps * batch_size,
        valid_samples=batch_size,
        test_samples=0,
    )
    assert datasets.train is not None and datasets.valid is not None  # both were asked for

    def batches_of(dataset: RowDataset) -> Iterator[Batch]:
        rows = program.placement.rows
        return batches(dataset, global_batch_size=batch_size, start_sample=0, rows=rows)

    state = program.init_state()
    losses = []
    for step, batch in enumerate(batches_of(datasets.train), start=1):
        state, metrics = program.train_step(state, program.place(batch))
        losses.append(float(metrics["loss"]))
        print(f"step {step}: loss {losses[-1]:.4f}, grad norm {float(metrics['grad_norm']):.3f}")

    batch = next(batches_of(datasets.valid))
    loss, tokens = program.eval_step(state["params"], program.place(batch))
    print(f"validation: loss {float(loss) / int(tokens):.4f} over {int(tokens)} tokens")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
