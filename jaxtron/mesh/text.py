"""An inspection as text: aligned tables for a terminal or a log."""

from collections.abc import Sequence
from textwrap import wrap

from jaxtron.mesh import grid
from jaxtron.mesh.axes import AXES, BATCH_AXES
from jaxtron.mesh.features import features
from jaxtron.mesh.inspect import Inspection, ParamReport
from jaxtron.parallel.context.layout import context_layout

_COLUMNS = 16  # most devices in a row of the grid
_ROWS = 16  # most rows of the grid; those in the middle are left out
_WIDTH = 100


def render(inspection: Inspection) -> str:
    """The whole inspection."""
    sections = [
        ("axes", axes_text(inspection)),
        ("device grid", grid_text(inspection)),
        ("parameters", params_text(inspection, inspection.params)),
        ("state", state_text(inspection)),
        ("features", features_text(inspection)),
    ]
    return "\n\n".join(f"{title}\n{text}" for title, text in sections)


def axes_text(inspection: Inspection) -> str:
    """Every axis with its size, its groups of devices, and what the rules split over it."""
    sizes = inspection.sizes
    rows = [["axis", "size", "groups", "one group", "splits"]]
    for axis in AXES:
        split = ", ".join(name for name, axes in inspection.rules.table.items() if axis in axes)
        if sizes[axis] == 1:
            rows.append([axis, "1", "", "", ""])
        else:
            found = grid.groups(sizes, axis)
            rows.append([axis, str(sizes[axis]), str(len(found)), numbers(found[0]), split])
    text = table(rows, right=(1, 2))
    return f"{text}\n{inspection.num_devices} devices, numbered along the last axis first"


def grid_text(inspection: Inspection) -> str:
    """Device numbers, the innermost live axis along the rows."""
    sizes = inspection.sizes
    live = [axis for axis in AXES if sizes[axis] > 1]
    if not live:
        return "one device, number 0"
    inner, size = live[-1], sizes[live[-1]]
    if size <= _COLUMNS:
        outer, width = live[:-1], size
        heads = [f"{inner} 0", *map(str, range(1, width))]
    else:
        # A long axis is broken into rows; each says where on the axis it begins.
        outer, width = live, _COLUMNS
        heads = [f"+{i}" for i in range(width)]
    rows = [[*outer, *heads]]
    starts = [
        group + offset
        for group in range(0, inspection.num_devices, size)
        for offset in range(0, size, width)
    ]
    for start in starts:
        point = grid.coordinates(sizes, start)
        row = range(start, start + min(width, size - start % size))
        cells = [*(str(point[axis]) for axis in outer), *map(str, row)]
        rows.append(cells + [""] * (len(rows[0]) - len(cells)))
    if len(starts) > _ROWS:
        left_out = len(starts) - _ROWS
        rows[1 + _ROWS // 2 : -(_ROWS // 2)] = [[f"… {left_out} rows"]]
    return table(rows, right=range(len(rows[0])))


def params_text(inspection: Inspection, params: Sequence[ParamReport]) -> str:
    """One line per parameter: names of dimensions, shape, PartitionSpec, a device's piece."""
    rows = [["name", "logical axes", "shape", "stored PartitionSpec", "shard", "bytes/device"]]
    rows += [
        [
            param.name,
            ", ".join(str(name) if name else "-" for name in param.layout.logical),
            shape_text(param.shape),
            param.spec_text(),
            shape_text(param.stored),
            f"{param.bytes:,}",
        ]
        for param in params
    ]
    rows.append(["total", "", "", "", "", f"{sum(param.bytes for param in params):,}"])
    return table(rows, right=(5,)) + (
        "\nfp32 master weights as stored between steps; layers compute with copies in "
        f"{inspection.config.precision.compute}"
    )


def state_text(inspection: Inspection) -> str:
    """Bytes of a device's state at every level of data sharding."""
    rows = [["data_sharding", "copies", "gradients", "weights", "optimizer", "total/device"]]
    for entry in inspection.state:
        mark = " *" if entry is inspection.current else ""
        counts = (entry.copies, entry.gradients, entry.params, entry.optimizer, entry.total)
        rows.append([entry.level + mark, *(bytes_text(count) for count in counts)])
    return table(rows, right=range(1, 6)) + (
        "\n* configured. Largest device; activations and temporary buffers are not in it"
    )


def features_text(inspection: Inspection) -> str:
    """The effective value of every feature."""
    named = features(inspection)
    width = max(len(name) for name, _ in named)
    lines = []
    for name, value in named:
        wrapped = [
            line
            for paragraph in value.splitlines()
            for line in wrap(paragraph, _WIDTH - width - 2, break_on_hyphens=False)
        ]
        lines += [
            f"{label:<{width}}  {line}"
            for label, line in zip([name, *[""] * len(wrapped)], wrapped, strict=False)
        ]
    return "\n".join(lines)


def param_text(inspection: Inspection, param: ParamReport) -> str:
    """One parameter in full: each dimension's rule, the copy, who holds the same piece."""
    sizes, layout = inspection.sizes, param.layout
    rows = [["dimension", "size", "rule", "stored over", "shard"]]
    for name, dim, axes, shard in zip(
        layout.logical, param.shape, param.stored_axes(), param.stored, strict=True
    ):
        rule = ", ".join(inspection.rules.table[name]) or "never split" if name else "no name"
        rows.append([name or "-", str(dim), rule, ", ".join(axes) or "-", str(shard)])
    split = {axis for axes in param.stored_axes() for axis in axes}
    alike = [axis for axis in AXES if sizes[axis] > 1 and axis not in split]
    holders = grid.parts(sizes, alike)
    return "\n".join(
        [
            param.name,
            table(rows, right=(1, 4)),
            f"elements        {param.size:,}",
            f"stored          {param.spec_text()}, {shape_text(param.stored)} fp32 a device, "
            f"{bytes_text(param.bytes)}",
            f"copy            {shape_text(param.copy)} a device, "
            + ("gathered over " + ", ".join(layout.zero_axes) if layout.zero_axes else "no gather"),
            f"same piece on   {holders} device{'s' if holders > 1 else ''}"
            + (f" (over {', '.join(alike)})" if alike else ""),
        ]
    )


def axis_text(inspection: Inspection, axis: str) -> str:
    """One axis: its groups of devices, and the parameters split over it."""
    sizes = inspection.sizes
    found = grid.groups(sizes, axis)
    shown = [f"  {numbers(group)}" for group in found[:_ROWS]]
    if len(found) > _ROWS:
        shown.append(f"  … {len(found) - _ROWS} more")
    rules = [name for name, axes in inspection.rules.table.items() if axis in axes]
    split = [param.name for param in inspection.params if axis in sum(param.stored_axes(), ())]
    return "\n".join(
        [
            f"{axis}: {sizes[axis]} devices a group, numbers {grid.stride(sizes, axis)} apart",
            f"groups ({len(found)}):",
            *shown,
            f"splits dimensions named: {', '.join(rules) or 'none'}",
            f"parameters stored in pieces over it ({len(split)}): {', '.join(split) or 'none'}",
        ]
    )


def device_text(inspection: Inspection, device: int) -> str:
    """What one device holds and computes."""
    sizes = inspection.sizes
    point = grid.coordinates(sizes, device)
    where = ", ".join(f"{axis} {point[axis]}" for axis in AXES if sizes[axis] > 1) or "alone"
    cut, length = inspection.batch, inspection.config.data.seq_length
    rows = grid.span(sizes, BATCH_AXES, point, cut.rows_per_microbatch)
    context = context_layout(inspection.config.parallel, sizes["context"])
    tokens = context.spans(length, point["context"])
    lines = [
        f"device {device}: {where}",
        f"batch      rows {range_text(rows)} of the {cut.rows_per_microbatch} of every microbatch, "
        f"positions {ranges_text(tokens)} of {length}",
    ]
    table_rows = [["parameter", "holds", "bytes"]]
    for param in inspection.params:
        spans = param.held_by(sizes, point)
        held = ", ".join(
            ":" if sum(map(len, ranges)) == dim else ranges_text(ranges)
            for ranges, dim in zip(spans, param.shape, strict=True)
        )
        count = 4
        for ranges in spans:
            count *= sum(map(len, ranges))
        table_rows.append([param.name, f"[{held}]", f"{count:,}"])
    return "\n".join([*lines, table(table_rows, right=(2,))])


def rule_text(inspection: Inspection, name: str) -> str:
    """One row of the logical-axis table, and the parameters it touches."""
    axes = inspection.rules.table[name]
    live = inspection.rules.axes(name)
    used = [param.name for param in inspection.params if name in param.layout.logical]
    return "\n".join(
        [
            f"rule {name} -> {', '.join(axes) or 'never split'}"
            + (f": {inspection.rules.size(name)} parts over {', '.join(live)}" if live else ""),
            f"parameters with such a dimension ({len(used)}): {', '.join(used) or 'none'}",
        ]
    )


def table(rows: Sequence[Sequence[str]], right: Sequence[int] | range = ()) -> str:
    """Rows with their columns aligned; ``right`` lists the columns aligned to the right."""
    columns = len(rows[0])
    full = [row for row in rows if len(row) == columns]
    widths = [max(len(row[column]) for row in full) for column in range(columns)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right and len(row) == columns else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join("  " + line for line in lines)


def shape_text(shape: Sequence[int]) -> str:
    """``4×64×8``."""
    return "×".join(map(str, shape)) or "scalar"


def numbers(group: range) -> str:
    """Device numbers of a group; the middle of a long one is left out."""
    shown = list(map(str, group))
    return " ".join([*shown[:6], "…", shown[-1]] if len(shown) > 8 else shown)


def range_text(span: range) -> str:
    """``0:4`` as in a slice; ``none`` when empty."""
    return f"{span.start}:{span.stop}" if span else "none"


def ranges_text(ranges: Sequence[range]) -> str:
    """``0:2+4:6``; ``none`` without any."""
    return "+".join(map(range_text, ranges)) or "none"


def bytes_text(count: float) -> str:
    """Decimal units, as cards are sold: ``77.6 GB``."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    decimals = 0 if units[0] == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{decimals}f} {units[0]}"
