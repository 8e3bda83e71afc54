"""Curves of a run as SVG text."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

MAX_POINTS = 1500
"""A curve with more steps is drawn as the mean of equal groups of steps, with their range."""

_BLUE, _ORANGE, _GREY = "#2563a8", "#c2410c", "#64748b"
_EVALUATION_COLOURS = (_ORANGE, "#be185d", "#4d7c0f", "#0369a1", "#92400e")
_REFERENCE_COLOURS = ("#15803d", "#7c3aed", "#a16207", "#0e7490")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 10,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


class Series(NamedTuple):
    """Values over steps; NaN where there is none."""

    steps: np.ndarray
    values: np.ndarray


class ReferenceLine(NamedTuple):
    """A horizontal line to compare a curve with."""

    label: str
    value: float


def loss_plot(
    train: Series, evaluations: Mapping[str, Series], references: Sequence[ReferenceLine] = ()
) -> str:
    """Training loss, evaluation losses by label and reference lines over steps, as SVG."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": "loss"}):
        figure = Figure(figsize=(10.4, 4.9), layout="constrained")
        axes = figure.subplots()
        smooth = _smoothed(train.values)
        if smooth is None:
            _curve(axes, train, _BLUE, label="train", linewidth=1.6)
        else:
            _curve(axes, train, "#9dbfe3", label="train, each step", linewidth=0.9)
            window = f"train, mean over {smooth.window} steps"
            _curve(axes, Series(train.steps, smooth.values), _BLUE, label=window, band=False)
        for number, (label, series) in enumerate(evaluations.items()):
            colour = _EVALUATION_COLOURS[number % len(_EVALUATION_COLOURS)]
            axes.plot(*series, "o-", color=colour, markersize=4.5, linewidth=1.2, label=label)
        for number, line in enumerate(references):
            colour = _REFERENCE_COLOURS[number % len(_REFERENCE_COLOURS)]
            label = f"{line.label}: {line.value:.3f}"
            axes.axhline(line.value, color=colour, linestyle="--", linewidth=1.3, label=label)
        broken = train.steps[~np.isfinite(train.values)]
        if len(broken):
            axes.plot(
                broken,
                np.full(len(broken), 0.015),
                "x",
                color="#b91c1c",
                transform=axes.get_xaxis_transform(),
                label="loss is not a number",
            )
        levels = np.array([line.value for line in references])
        evaluated = [series.values for series in evaluations.values()]
        _scale(axes, np.concatenate([train.values, *evaluated, levels]))
        axes.set_ylabel("loss [nats per token]")
        figure.legend(loc="outside upper left", ncols=3)
        return _svg(figure, axes, "Training and evaluation loss over steps")


def learning_rate_plot(series: Series) -> str:
    """Learning rate over steps, as SVG."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": "lr"}):
        figure, axes = _small()
        _curve(axes, series, _BLUE, linewidth=1.6)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.set_ylabel("learning rate")
        return _svg(figure, axes, "Learning rate over steps")


def gradient_norm_plot(series: Series) -> str:
    """Global gradient norm before clipping over steps, as SVG."""
    return _one_curve(series, "gradient norm", "Global gradient norm over steps")


def throughput_plot(series: Series) -> str:
    """Tokens per second and device over steps, with their median, as SVG."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": "throughput"}):
        figure, axes = _small()
        _curve(axes, series, _BLUE, linewidth=1.1)
        if np.isfinite(series.values).any():
            median = float(np.nanmedian(series.values))
            axes.axhline(
                median, color=_GREY, linestyle="--", linewidth=1.2, label=f"median {median:,.0f}"
            )
            axes.set_ylim(0, 1.18 * float(np.nanmax(series.values)))
            axes.legend(loc="upper right", borderaxespad=0.1)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylabel("tokens/s per device")
        return _svg(figure, axes, "Tokens per second and device over steps")


def step_time_plot(series: Series) -> str:
    """Wall time of a step over steps, as SVG."""
    return _one_curve(series, "step time [s]", "Wall time of a step over steps")


def rates_plot(rates: Mapping[str, float]) -> str:
    """TFLOP/s per GPU by the name of a benchmark, as bars, in SVG."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": "rates"}):
        figure = Figure(figsize=(8.0, 1.0 + 0.34 * len(rates)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(rates), list(rates.values()), color=_BLUE, height=0.7)
        axes.bar_label(bars, fmt="{:.0f}", padding=4, color="#334155")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_axisbelow(True)
        axes.set_xlabel("TFLOP/s per GPU")
        axes.margins(x=0.08, y=0.02)
        return _text(figure, "TFLOP/s per GPU")


class _Smooth(NamedTuple):
    values: np.ndarray
    window: int


def _smoothed(values: np.ndarray) -> _Smooth | None:
    """Centred mean over a hundredth of the run; None for a run too short to need it.

    The window shrinks towards both ends, so that it stays centred there.
    """
    window = len(values) // 100 | 1
    if window < 3:
        return None
    steps = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(steps, steps[::-1]))
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    first, end = steps - half, steps + half + 1
    number = count[end] - count[first]
    mean = (total[end] - total[first]) / np.maximum(number, 1)
    return _Smooth(np.where(number > 0, mean, np.nan), window)


def _curve(
    axes: Axes,
    series: Series,
    colour: str,
    *,
    label: str | None = None,
    linewidth: float = 1.8,
    band: bool = True,
) -> None:
    """Draw a curve; a long one as means of groups of steps, with the groups' range behind it."""
    steps, values = series
    group = math.ceil(len(steps) / MAX_POINTS)
    marker = "." if len(steps) == 1 else None
    if group > 1:
        whole = len(steps) // group * group
        rows = np.ma.masked_invalid(values[:whole].reshape(-1, group))
        steps = steps[:whole].reshape(-1, group).mean(axis=1)
        if band:
            low, high = rows.min(axis=1).filled(np.nan), rows.max(axis=1).filled(np.nan)
            axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
        values = rows.mean(axis=1).filled(np.nan)
    axes.plot(steps, values, color=colour, linewidth=linewidth, label=label, marker=marker)


def _scale(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic axis where positive values span more than a factor of ten."""
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _one_curve(series: Series, label: str, description: str) -> str:
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": label}):
        figure, axes = _small()
        _curve(axes, series, _BLUE, linewidth=1.1)
        _scale(axes, series.values)
        axes.set_ylabel(label)
        return _svg(figure, axes, description)


def _small() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.1, 3.0), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, axes: Axes, description: str) -> str:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.01)
    return _text(figure, description)


def _text(figure: Figure, description: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    svg = text[text.index("<svg") :]
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
