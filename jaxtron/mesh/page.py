"""An inspection as one self-contained HTML page."""

import json
from html import escape
from importlib.resources import files
from typing import Any

from jaxtron.mesh import grid
from jaxtron.mesh.axes import AXES
from jaxtron.mesh.features import features
from jaxtron.mesh.inspect import Inspection, ParamReport
from jaxtron.mesh.text import bytes_text, ranges_text, shape_text

_MOST_DEVICES = 2048  # squares of the grid that a browser draws without effort


def page(inspection: Inspection) -> str:
    """The page: ``page.html`` with the inspection's data filled in; it loads nothing else."""
    template = files("jaxtron.mesh").joinpath("page.html").read_text(encoding="utf-8")
    live = " × ".join(f"{axis} {size}" for axis, size in inspection.sizes.items() if size > 1)
    title = f"{inspection.num_devices} devices: {live or 'one device'}"
    # "</script>" in a string would end the script element.
    data = json.dumps(_data(inspection)).replace("</", "<\\/")
    return template.replace("{{title}}", escape(title)).replace("{{data}}", data)


def _data(inspection: Inspection) -> dict[str, Any]:
    sizes, cut = inspection.sizes, inspection.batch
    return {
        "axes": [
            {
                "name": axis,
                "size": sizes[axis],
                "stride": grid.stride(sizes, axis),
                "splits": [name for name, axes in inspection.rules.table.items() if axis in axes],
            }
            for axis in AXES
        ],
        "devices": inspection.num_devices,
        "mostDevices": _MOST_DEVICES,
        "params": [_param(param) for param in inspection.params],
        "state": [
            {
                "level": entry.level,
                "current": entry is inspection.current,
                "parts": [entry.copies, entry.gradients, entry.params, entry.optimizer],
                "texts": [
                    bytes_text(count)
                    for count in (entry.copies, entry.gradients, entry.params, entry.optimizer)
                ],
                "total": entry.total,
                "totalText": bytes_text(entry.total),
            }
            for entry in inspection.state
        ],
        "features": features(inspection),
        "batchAxes": inspection.rules.axes("batch"),
        "sequenceAxes": inspection.rules.axes("sequence"),
        "rows": cut.rows_per_microbatch,
        "tokens": inspection.config.data.seq_length,
    }


def _param(param: ParamReport) -> dict[str, Any]:
    return {
        "name": param.name,
        "logical": [name or "-" for name in param.layout.logical],
        "shape": param.shape,
        "stages": None
        if param.layers is None
        else [
            ":" if sum(map(len, held)) == param.shape[0] else ranges_text(held)
            for held in map(param.layers.held_by, range(len(param.layers.layers)))
        ],
        "axes": param.stored_axes(),
        "spec": param.spec_text(),
        "shard": shape_text(param.stored),
        "bytes": f"{param.bytes:,}",
    }
