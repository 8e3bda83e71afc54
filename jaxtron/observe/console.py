"""What a person sees while a run goes on: Megatron's log line and a progress bar."""

import datetime
import math
import shutil
import sys
from collections.abc import Mapping
from typing import Literal

from tqdm import tqdm

from jaxtron.observe.records import Scalar
from jaxtron.observe.throughput import Keys, Throughput

_PLANS = {"decoupled_lr": "decoupled learning rate", "weight_decay": "weight decay"}
"""Words of the line for what a plan gives, if the run has one."""


class Console:
    """Prints lines to standard output and keeps a progress bar at the foot of a terminal."""

    def __init__(
        self, progress: Literal["auto", "on", "off"], *, total_steps: int, start_step: int
    ) -> None:
        """Open the bar if ``progress`` asks for it; ``auto``: if stderr is a terminal."""
        shown = progress == "on" or (progress == "auto" and sys.stderr.isatty())
        self._bar: tqdm | None = None
        if shown:
            # A pseudo-terminal without a size has 0 rows, on which tqdm would hide the bar.
            rows = shutil.get_terminal_size().lines
            self._bar = tqdm(
                total=total_steps, initial=start_step, unit="step", file=sys.stderr, nrows=rows
            )

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def advance(self, record: Mapping[str, Scalar]) -> None:
        """Move the bar to the record's step."""
        if self._bar is None:
            return
        self._bar.set_postfix_str(
            f"loss {record['loss']:.4f}, {record['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU",
            refresh=False,
        )
        self._bar.update(int(record["step"] or 0) - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


class LogLine:
    """Gathers steps and writes Megatron-LM's training log line about them.

    Loss and time are means over the steps since the last line, as Megatron's are; everything else
    is the last step's. A step whose loss is not a number is left out of the mean and counted.
    """

    def __init__(self, total_steps: int, throughput: Throughput) -> None:
        """Start with an empty interval."""
        self._total_steps = total_steps
        self._throughput = throughput
        self._steps: list[Mapping[str, Scalar]] = []

    def add(self, record: Mapping[str, Scalar]) -> None:
        """Take one step's record into the interval."""
        self._steps.append(record)

    def take(self) -> str:
        """The line for the interval, which then starts anew."""
        steps, self._steps = self._steps, []
        last = steps[-1]
        seconds = sum(_number(step, "step_time_s") for step in steps)
        tokens = sum(int(_number(step, "tokens")) for step in steps)
        rates = self._throughput.rates(tokens, seconds, Keys.of(steps))
        losses = [loss for step in steps if math.isfinite(loss := _number(step, "loss"))]
        loss = sum(losses) / len(losses) if losses else math.nan
        skipped = sum(int(step.get("skipped") or 0) for step in steps)

        fields = [
            f"iteration {last['step']:8d}/{self._total_steps:8d}",
            f"consumed samples: {last['consumed_samples']:12d}",
            f"elapsed time per iteration (ms): {seconds / len(steps) * 1e3:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {_fixed(rates['tflops_per_gpu'])}",
            f"learning rate: {last['lr']:.6E}",
            *(f"{words}: {last[name]:.6E}" for name, words in _PLANS.items() if name in last),
            f"global batch size: {last['global_batch_size']:5d}",
            f"lm loss: {loss:.6E}",
        ]
        if "loss_scale" in last:
            fields.append(f"loss scale: {last['loss_scale']:.1f}")
        fields.append(f"grad norm: {last['grad_norm']:.3f}")
        if "num_zeros" in last:
            fields.append(f"num zeros: {last['num_zeros']}")
        if "params_norm" in last:
            fields.append(f"params norm: {last['params_norm']:.3f}")
        fields += [
            f"number of skipped iterations: {skipped:3d}",
            f"number of nan iterations: {len(steps) - len(losses):3d}",
            f"tokens per second per GPU: {rates['tokens_per_s_per_gpu']:.1f}",
        ]
        if rates["mfu"] is not None:
            fields.append(f"MFU: {rates['mfu'] * 100:.1f}%")
        return f" [{_now()}] " + " | ".join(fields) + " |"


def evaluation_line(step: int, record: Mapping[str, Scalar]) -> str:
    """Megatron-LM's validation line, with the tokens it rests on and the loss of each named set."""
    loss = _number(record, "eval_loss")
    fields = [
        f"validation loss at iteration {step}",
        f"lm loss value: {loss:.6E}",
        f"lm loss PPL: {_exp(loss):.6E}",
    ]
    if "eval_tokens" in record:
        fields.append(f"evaluated tokens: {record['eval_tokens']}")
    for key in record:
        if key.startswith("eval_loss/"):
            fields.append(f"{key.removeprefix('eval_loss/')}: {_number(record, key):.6E}")
    if "test_loss" in record:
        loss = _number(record, "test_loss")
        fields += [f"test loss: {loss:.6E}", f"test tokens: {record['test_tokens']}"]
    return f" [{_now()}] " + " | ".join(fields) + " |"


def _number(record: Mapping[str, Scalar], key: str) -> float:
    value = record[key]
    return math.nan if value is None else value


def _fixed(value: float | None) -> str:
    """Plain decimals, as parsers of the line expect; more of them for a CPU's small rates."""
    if value is None:
        return "nan"
    return f"{value:.1f}" if value >= 10 else f"{value:.4f}"


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
