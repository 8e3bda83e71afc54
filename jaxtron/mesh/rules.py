"""Logical-axis rules: the one table that maps names of dimensions to mesh axes.

Modules name the dimensions of their parameters (``embed``, ``heads``, ``mlp``, ``vocab`` …); this
table says over which mesh axes a dimension of that name is split. ``parallel.rules`` in the
configuration overrides single rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import AXES, BATCH_AXES
from jaxtron.nearest import nearest

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    # activations
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),
    # state that only data parallelism would replicate (ZeRO)
    "zero": ("fsdp", "expert", "context"),
    # parameters
    "layers": ("pipeline",),
    "vocab": ("pipeline", "tensor"),
    "position": (),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "latent": (),
    "mlp": ("tensor",),
    "router": (),
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
}

# A dimension with one of these names may be smaller than its mesh axes: it is then replicated over
# them (each device uses the part it needs), provided the axes' size is a multiple of it.
REPLICATED_WHEN_SMALLER = frozenset({"kv_heads"})

# Dimensions that layers can compute with in pieces, or whole; all others they need whole.
SPLIT_OVER_TENSOR = ("vocab", "heads", "kv_heads", "mlp", "expert_mlp")
# Axes that whole experts may be split over.
EXPERT_AXES = ("expert", "context", "tensor")


@dataclass(frozen=True)
class LogicalRules:
    """The table, with the sizes of the mesh axes it refers to."""

    table: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes of size > 1 over which the logical axis ``name`` is split."""
        return tuple(a for a in self.table[name] if self.sizes[a] > 1)

    def size(self, name: str) -> int:
        """Number of parts into which the logical axis ``name`` is split."""
        total = 1
        for axis in self.axes(name):
            total *= self.sizes[axis]
        return total

    def spec(
        self, logical: Sequence[str | None], shape: Sequence[int], where: str = "array"
    ) -> PartitionSpec:
        """PartitionSpec of an array whose dimensions carry the logical names ``logical``.

        Args:
            logical: one name (or None: never split) per dimension.
            shape: sizes of the dimensions.
            where: name of the array for messages.

        Raises:
            ConfigError: a rule does not divide the dimension, or two dimensions of the array use
                the same mesh axis.
        """
        entries: list[tuple[str, ...] | None] = []
        used: dict[str, str] = {}
        for name, dim in zip(logical, shape, strict=True):
            axes = self.axes(name) if name else ()
            parts = self.size(name) if name else 1
            if name in REPLICATED_WHEN_SMALLER and dim < parts and parts % dim == 0:
                axes, parts = (), 1
            if dim % parts:
                raise ConfigError(
                    f"{where}: dimension {name!r} of size {dim} cannot be split in {parts} parts "
                    f"(rule {name} -> {', '.join(axes)}); choose sizes of these mesh axes whose "
                    f"product divides {dim}, or override parallel.rules.{name}"
                )
            for axis in axes:
                if axis in used:
                    raise ConfigError(
                        f"{where}: mesh axis {axis!r} would split {used[axis]!r} and {name!r}; "
                        f"change parallel.rules.{used[axis]} or parallel.rules.{name}"
                    )
                used[axis] = str(name)
            entries.append(axes or None)
        return PartitionSpec(*entries)


def make_rules(
    overrides: Mapping[str, str | Sequence[str] | None], sizes: Mapping[str, int]
) -> LogicalRules:
    """The default table with the rows of ``parallel.rules`` replaced.

    Raises:
        ConfigError: an override names an unknown logical axis or mesh axis, or an axis twice.
    """
    table = dict(DEFAULT_RULES)
    for name, value in overrides.items():
        if name not in table:
            raise ConfigError(
                f"parallel.rules.{name}: no such logical axis; {nearest(name, table)}"
            )
        axes = () if value is None else (value,) if isinstance(value, str) else tuple(value)
        for axis in axes:
            if axis not in AXES:
                raise ConfigError(
                    f"parallel.rules.{name}: no mesh axis {axis!r}; {nearest(axis, AXES)}"
                )
        if len(set(axes)) != len(axes):
            raise ConfigError(f"parallel.rules.{name}: a mesh axis stands twice in {list(axes)}")
        table[name] = axes
    return LogicalRules(table, dict(sizes))


def check_layers(rules: LogicalRules) -> Iterator[str]:
    """Rows of the table that the layers and the loss cannot compute with, each with its fix.

    The manual region's arithmetic follows from where a dimension is split, so a row outside these
    bounds would give a wrong result or none: ``batch`` and ``sequence`` take all their axes,
    ``layers`` the pipeline's; ``vocab, heads, kv_heads, mlp, expert_mlp`` are split over ``tensor``
    or whole, ``vocab`` over ``pipeline`` too; ``experts`` over some of ``EXPERT_AXES``; other
    dimensions of parameters are whole. ``zero`` is free.
    """
    for name, needed in (
        ("batch", BATCH_AXES),
        ("sequence", ("context",)),
        ("layers", ("pipeline",)),
    ):
        live = {axis for axis in needed if rules.sizes[axis] > 1}
        if set(rules.axes(name)) != live:
            yield (
                f"parallel.rules.{name} is {_shown(rules.table[name])}, but it must hold every "
                f"axis that splits the {name}: set it to {_shown(needed)}"
            )
    for name in rules.table:
        if name in ("batch", "sequence", "layers", "zero"):
            continue
        if name == "experts":
            if not set(rules.axes(name)) <= set(EXPERT_AXES):
                yield (
                    f"parallel.rules.experts is {_shown(rules.table[name])}, but tokens travel to "
                    f"their experts over {', '.join(EXPERT_AXES)} alone: set it to some of these"
                )
            continue
        allowed: list[tuple[str, ...]] = [("tensor",)] if name in SPLIT_OVER_TENSOR else []
        if name == "vocab":
            allowed.append(("pipeline", "tensor"))
        live_axes = [tuple(a for a in axes if rules.sizes[a] > 1) for axes in [(), *allowed]]
        if rules.axes(name) not in live_axes:
            how = "split over tensor or whole" if allowed else "whole"
            fix = " or ".join([*map(_shown, allowed[::-1]), "null"])
            yield (
                f"parallel.rules.{name} is {_shown(rules.table[name])}, but layers compute with "
                f"{name} {how}: set it to {fix} (parameters "
                "are stored in more pieces by parallel.rules.zero)"
            )
    if rules.axes("kv_heads") and not rules.axes("heads"):
        yield (
            "parallel.rules.kv_heads is split over tensor but parallel.rules.heads is not: set "
            "parallel.rules.kv_heads to null too"
        )


def _shown(axes: Sequence[str]) -> str:
    return f"[{', '.join(axes)}]" if axes else "null"
