"""Combinations of keys that cannot work, each found before anything is built, with its fix.

:func:`validate` holds for every use of a configuration (training, mesh inspection, conversion) on
any machine; :func:`validate_for_training` adds what only a training run needs.
"""

from collections.abc import Callable, Iterator, Mapping

from jaxtron.config.config import Config
from jaxtron.config.reads import unread
from jaxtron.config.validate_dynamic_context import DYNAMIC_CONTEXT_CHECKS
from jaxtron.config.validate_layout import AXES_CHECKS
from jaxtron.config.validate_model import SHAPE_CHECKS
from jaxtron.config.validate_moe import MOE_LAYOUT_CHECKS, MOE_MODEL_CHECKS
from jaxtron.config.validate_training import TRAINING_CHECKS
from jaxtron.errors import ConfigError
from jaxtron.mesh.axes import resolve_axes

Axes = Mapping[str, int]


def validate(config: Config, num_devices: int) -> dict[str, int]:
    """Check the configuration for a job of ``num_devices`` devices.

    Returns:
        the size of each mesh axis.

    Raises:
        ConfigError: every problem found, one a line, each with what would be right.
    """
    problems = list(unread(config, PROGRAM_SECTIONS))
    problems += [problem for check in MODEL_CHECKS for problem in check(config)]
    axes: dict[str, int] = {}
    try:
        axes = resolve_axes(config.parallel, num_devices)
    except ConfigError as error:
        problems.append(str(error))
    else:
        problems += [problem for check in LAYOUT_CHECKS for problem in check(config, axes)]
    if problems:
        raise ConfigError("\n".join(problems))
    return axes


def validate_for_training(config: Config, num_devices: int) -> dict[str, int]:
    """:func:`validate`, and that this configuration can be trained here.

    Raises:
        ConfigError: as :func:`validate`; or layers cannot use a row of ``parallel.rules``, or the
            tokenizer does not fit the model.
    """
    axes = validate(config, num_devices)
    problems = [problem for check in TRAINING_CHECKS for problem in check(config, axes)]
    if problems:
        raise ConfigError("\n".join(problems))
    return axes


PROGRAM_SECTIONS = ("model", "parallel", "train", "precision")
"""Sections that every use of a configuration reads; the others are those of a training run."""

MODEL_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (*SHAPE_CHECKS, *MOE_MODEL_CHECKS)
"""Checks that hold on any mesh; each yields ``what is wrong: what would be right``."""

LAYOUT_CHECKS: tuple[Callable[[Config, Axes], Iterator[str]], ...] = (
    *AXES_CHECKS,
    *MOE_LAYOUT_CHECKS,
    *DYNAMIC_CONTEXT_CHECKS,
)
"""Checks against the sizes of the mesh axes."""
