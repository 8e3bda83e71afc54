"""``python -m jaxtron.train --config FILE [section.key=value ...]``: train a model."""

import argparse
import logging
import os
import signal
import sys
import traceback
from typing import NoReturn

import jax

from jaxtron.cli import parse_with_overrides, run
from jaxtron.config.config import Config
from jaxtron.config.help import help_config
from jaxtron.config.load import load_config
from jaxtron.launch.initialize import launch, shutdown
from jaxtron.observe.kernels import kernels_of
from jaxtron.resilience.exits import EXIT_SIGNALS, exit_status
from jaxtron.trainer import Trainer

EXAMPLE = """example:
  python -m jaxtron.train --config configs/tiny.yaml train.steps=20 parallel.tensor=2 \\
      runtime.cpu_devices=8 checkpoint.dir=run/checkpoints observe.dir=run
"""


def main(argv: list[str] | None = None) -> int:
    """Parse, launch, train; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxtron train",
        description="Train a model. A run resumes from the newest checkpoint in checkpoint.dir.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file, or the name of a preset")
    parser.add_argument(
        "--help-config", action="store_true", help="list every configuration key and exit"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values over those of the file"
    )
    args = parse_with_overrides(parser, argv)
    if args.help_config:
        print(help_config())
        return 0
    _set_up_logging()
    config = load_config(args.config, args.overrides)
    launch(config.runtime)
    return _train_in_job(config) if jax.distributed.is_initialized() else _train(config)


def _set_up_logging() -> None:
    # force: libraries imported above may have set up logging already.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for noisy in ("absl", "jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Orbax logs the traceback of a failed write in every thread that meets it, and then raises it.
    logging.getLogger("absl").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = record.exc_text = None
    return True


def _train(config: Config) -> int:
    trainer = Trainer(config)
    log = logging.getLogger(__name__)
    log.info("kernels: %s", ", ".join(f"{k} {v}" for k, v in kernels_of(trainer.program).items()))
    result = trainer.fit()
    eval_loss = "" if result.eval_loss is None else f", eval loss {result.eval_loss:.4f}"
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    if result.skipped:
        log.warning("%d steps of this launch updated nothing (`skipped`)", result.skipped)
    log.info("stopped at step %d (%s)%s%s", result.step, result.reason, loss, eval_loss)
    status = exit_status(result.reason)
    if status:
        for number in EXIT_SIGNALS:  # all is saved, and one more must not change the status
            signal.signal(number, signal.SIG_IGN)
    shutdown()
    if status:
        _leave(status)  # threads may be stuck in a read
    return status


def _train_in_job(config: Config) -> int:
    """Train as one of several processes; a failure ends this one at once.

    A regular exit would wait for the other processes, which wait for this one in a collective. Once
    it is gone their collectives or JAX's coordination service fail, and they end too.
    """
    try:
        status = run(lambda _: _train(config))
    except BaseException:
        traceback.print_exc()
        status = 1
    if status:
        _leave(status)
    return status


def _leave(status: int) -> NoReturn:
    """End the process without waiting for its threads or for other processes."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    raise SystemExit(run(main))
