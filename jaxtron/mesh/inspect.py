"""What a configuration means on a mesh of any size, worked out without the devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax

from jaxtron.config.batch import BatchLayout, batch_layout
from jaxtron.config.config import Config
from jaxtron.config.reads import check_reads
from jaxtron.config.validate import validate, validate_for_training
from jaxtron.errors import ConfigError
from jaxtron.layers.moe.expert_bias import split_buffers
from jaxtron.mesh import grid
from jaxtron.mesh.rules import LogicalRules, make_rules
from jaxtron.mesh.state_bytes import (
    FP32_BYTES,
    StateBytes,
    copy_shape,
    state_bytes,
    stored_shape,
)
from jaxtron.models.decoder import Decoder
from jaxtron.optim.optimizer import make_optimizer
from jaxtron.parallel.config import DataSharding
from jaxtron.parallel.param_layout import ParamLayout, is_layout, param_layouts
from jaxtron.parallel.pipeline.layout import Placement, place_layers
from jaxtron.parallel.pipeline.stack_order import stack_order
from jaxtron.precision.dtypes import DTYPES
from jaxtron.precision.fp8_layers import exceptions
from jaxtron.precision.fp8_setup import product_names


@dataclass(frozen=True)
class ParamReport:
    """One parameter on the mesh.

    Attributes:
        layout: its placement. Layers are padded in ``layout.shape`` to the same number on every
            pipeline stage.
        shape: its global shape.
        stored: shape of a device's piece as stored.
        copy: shape of the copy that a device's layers read.
        bytes: of a device's stored piece (fp32).
        layers: which layers each pipeline stage holds; None for a parameter that is no stack of
            layers, or one that is not split over stages.
    """

    layout: ParamLayout
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    copy: tuple[int, ...]
    bytes: int
    layers: Placement | None

    @property
    def name(self) -> str:
        """Path of the leaf."""
        return self.layout.name

    @property
    def size(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    def stored_axes(self) -> tuple[tuple[str, ...], ...]:
        """Per dimension, the mesh axes that split the stored parameter, major first."""
        return tuple(
            (entry,) if isinstance(entry, str) else tuple(entry or ())
            for entry in self.layout.stored_spec
        )

    def spec_text(self) -> str:
        """The stored PartitionSpec as Python would write it."""
        entries = []
        for axes in self.stored_axes():
            quoted = [f"'{axis}'" for axis in axes]
            entries.append(
                "None"
                if not quoted
                else quoted[0]
                if len(quoted) == 1
                else f"({', '.join(quoted)})"
            )
        return f"P({', '.join(entries)})"

    def held_by(
        self, sizes: Mapping[str, int], point: Mapping[str, int]
    ) -> tuple[tuple[range, ...], ...]:
        """Indices per dimension that a device holds of the stored parameter, as ranges.

        There are several ranges only where a stage has several chunks of layers, and none where it
        has no layer.
        """
        spans = []
        for name, axes, dim in zip(
            self.layout.logical, self.stored_axes(), self.shape, strict=True
        ):
            if name == "layers" and self.layers is not None:
                spans.append(self.layers.held_by(point["pipeline"]))
            else:
                spans.append((grid.span(sizes, axes, point, dim),))
        return tuple(spans)


@dataclass(frozen=True)
class Inspection:
    """A configuration on a mesh.

    Attributes:
        config: the configuration.
        sizes: sizes of the mesh axes.
        rules: the logical-axis table.
        params: every parameter, in the order of the model.
        state: bytes on the fullest device, at each level of data sharding.
        batch: the cut of the global batch.
        placement: layers of every pipeline stage.
        refusal: why this version would not train it; None: it would.
    """

    config: Config
    sizes: dict[str, int]
    rules: LogicalRules
    params: tuple[ParamReport, ...]
    state: tuple[StateBytes, ...]
    batch: BatchLayout
    placement: Placement
    refusal: str | None

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def parameter_count(self) -> int:
        """Parameters of the model, padding of the vocabulary included."""
        return sum(param.size for param in self.params)

    @property
    def current(self) -> StateBytes:
        """State at the configured level."""
        level = self.config.parallel.data_sharding
        return next(entry for entry in self.state if entry.level == level)


def default_devices(config: Config) -> int:
    """Smallest number of devices that the axis sizes allow (an axis of -1 counts as 1)."""
    parallel = config.parallel
    sizes = [getattr(parallel, axis) for axis in grid.AXES]
    return math.prod(size for size in sizes if size != -1)


def inspect_layout(config: Config, num_devices: int) -> Inspection:
    """Lay the model of ``config`` out on ``num_devices`` devices, which need not exist.

    Raises:
        ConfigError: the configuration cannot work on that many devices.
    """
    sizes = validate(config, num_devices)
    model = Decoder(config.model)
    precision, num_layers = config.precision, config.model.stacked_blocks
    try:
        check_reads(config)
        validate_for_training(config, num_devices)
        if precision.fp8 is not None:
            exceptions(precision, product_names(precision, model.products).values(), num_layers)
        refusal = None
    except ConfigError as error:
        refusal = str(error)
    rules = make_rules(config.parallel.rules, sizes)
    parallel = config.parallel
    placement = place_layers(
        num_layers,
        sizes["pipeline"],
        parallel.virtual_pipeline,
        parallel.pipeline_layout,
    )
    placed = placement if rules.axes("layers") == ("pipeline",) else None
    shapes = stack_order(placement).place(model.shapes) if placed else model.shapes
    optimizer = make_optimizer(
        config.optimizer,
        total_steps=config.train.steps,
        logical_axes=split_buffers(model.logical)[0],
    )
    abstract_optimizer = jax.eval_shape(optimizer.init, split_buffers(shapes)[0])

    def layouts(level: DataSharding) -> Any:
        dtype = DTYPES[precision.compute]
        return param_layouts(shapes, model.logical, rules, level, dtype)

    current = jax.tree.leaves(layouts(config.parallel.data_sharding), is_leaf=is_layout)
    return Inspection(
        config=config,
        sizes=sizes,
        rules=rules,
        params=tuple(
            _param_report(layout, shape.shape, sizes, placed)
            for layout, shape in zip(current, jax.tree.leaves(model.shapes), strict=True)
        ),
        state=tuple(
            state_bytes(level, layouts(level), abstract_optimizer, sizes, DTYPES[precision.grads])
            for level in get_args(DataSharding)
        ),
        batch=batch_layout(config, sizes),
        placement=placement,
        refusal=refusal,
    )


def _param_report(
    layout: ParamLayout,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    placement: Placement | None,
) -> ParamReport:
    stored = stored_shape(layout, sizes)
    return ParamReport(
        layout=layout,
        shape=shape,
        stored=stored,
        copy=copy_shape(layout, sizes),
        bytes=FP32_BYTES * math.prod(stored),
        layers=placement if "layers" in layout.logical else None,
    )
