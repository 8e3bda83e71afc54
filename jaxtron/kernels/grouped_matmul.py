"""Matrix products of experts: several kernels, and the rule that chooses between them."""

import logging

from jaxtron.errors import ConfigError
from jaxtron.kernels.grouped_matmul_bucketed import BucketedGroupedMatmul
from jaxtron.kernels.grouped_matmul_mosaic import MosaicGroupedMatmul
from jaxtron.kernels.grouped_matmul_padded import PaddedGroupedMatmul
from jaxtron.kernels.grouped_matmul_spec import GroupedMatmul, GroupedMatmulSpec
from jaxtron.kernels.grouped_matmul_xla import XlaGroupedMatmul
from jaxtron.log_once import log_once

logger = logging.getLogger(__name__)

GROUPED_MATMULS: dict[str, GroupedMatmul] = {
    backend.name: backend
    for backend in (
        PaddedGroupedMatmul(),
        XlaGroupedMatmul(),
        MosaicGroupedMatmul(),
        BucketedGroupedMatmul(),
    )
}
"""Backends by name, in the order in which ``auto`` tries them."""


def find_grouped_matmul(
    name: str, spec: GroupedMatmulSpec, platform: str
) -> tuple[GroupedMatmul, list[str]]:
    """The kernel for ``spec``, and the reasons of those before it that refused.

    Args:
        name: ``model.moe_grouped_gemm_backend``: ``auto`` takes the first that supports ``spec``.
        spec: what will be computed.
        platform: ``cpu`` or ``gpu``.

    Raises:
        ConfigError: a backend asked for by name refuses, or all do.
    """
    refusals: list[str] = []
    for backend in GROUPED_MATMULS.values() if name == "auto" else (GROUPED_MATMULS[name],):
        reason = backend.supports(spec, platform)
        if reason is None:
            return backend, refusals
        refusals.append(f"{backend.name} refused: {reason}")
    if spec.fp8:
        raise ConfigError(
            f"no kernel of model.moe_grouped_gemm_backend={name} multiplies experts in FP8 here: "
            f"{'; '.join(refusals)}; set precision.fp8_experts to false"
        )
    raise ConfigError(
        f"model.moe_grouped_gemm_backend={name} cannot be used: {'; '.join(refusals)}; set "
        "model.moe_grouped_gemm_backend to auto"
    )


def choose_grouped_matmul(name: str, spec: GroupedMatmulSpec, platform: str) -> GroupedMatmul:
    """:func:`find_grouped_matmul`, fitted to ``spec``; the choice and the refusals are logged."""
    backend, refusals = find_grouped_matmul(name, spec, platform)
    chosen = "auto" if name == "auto" else "asked for"
    log_once(logger, "; ".join([f"grouped matmul: {backend.name} ({chosen})", *refusals]))
    return backend.fitted(spec) if isinstance(backend, BucketedGroupedMatmul) else backend
