"""The FP8 plan that a configuration asks for."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxtron.errors import ConfigError
from jaxtron.layers.parameter import Product
from jaxtron.log_once import log_once
from jaxtron.mesh.axes import AXES
from jaxtron.mesh.rules import LogicalRules
from jaxtron.parallel.param_layout import ParamLayout, is_layout
from jaxtron.parallel.reduction import Reduction
from jaxtron.parallel.region import Region
from jaxtron.precision.checks import check_device
from jaxtron.precision.config import PrecisionConfig
from jaxtron.precision.fp8_delayed import DelayedScaling
from jaxtron.precision.fp8_layers import exceptions
from jaxtron.precision.fp8_plan import Fp8Plan
from jaxtron.precision.fp8_te import require_transformer_engine
from jaxtron.precision.fp8_weight import Backend, Fp8Recipe, Fp8Site
from jaxtron.precision.quantise import E4M3, E5M2

logger = logging.getLogger(__name__)


def make_fp8_plan(
    config: PrecisionConfig,
    *,
    products: Mapping[str, Product] | None,
    layouts: Any,
    num_layers: int,
    rules: LogicalRules,
    region: Region,
    gathers_in_layer: bool,
    reduction: Reduction,
    tokens: int,
    device: jax.Device,
) -> Fp8Plan | None:
    """The plan of ``precision.fp8``; None without FP8.

    Args:
        config: the section.
        products: per weight of a layer (``attention/query``), its product; None: the model has
            none.
        layouts: of the layers' parameters, layers in the first dimension.
        num_layers: layers of the model.
        rules: the logical-axis table.
        region: the manual region.
        gathers_in_layer: weights are gathered where they are used.
        reduction: of gradients over devices.
        tokens: in a step.
        device: one of the devices.

    Raises:
        ConfigError: the device, the model or the exceptions leave nothing to do in FP8.
    """
    if config.fp8 is None:
        return None
    check_device(config, device)
    names = product_names(config, products)
    products = {path: product for path, product in (products or {}).items() if path in names}
    backend: Backend = "xla" if config.fp8_backend == "auto" else config.fp8_backend
    if backend == "te":
        require_transformer_engine(device.platform)
    reason = "auto: XLA's products add residuals and gradient sums themselves, te's do not"
    log_once(
        logger,
        f"fp8 products: {backend} ({reason if config.fp8_backend == 'auto' else 'asked for'})"
        + ("" if device.platform != "cpu" else "; a CPU multiplies the same values in fp32"),
    )
    recipe = Fp8Recipe(
        forward=E4M3,
        backward=E5M2 if config.fp8_format == "hybrid" else E4M3,
        backend=backend,
        on_gpu=device.platform != "cpu",
    )
    within = {
        jax.tree_util.keystr(path, simple=True, separator="/"): layout.unstacked()
        for path, layout in jax.tree_util.tree_leaves_with_path(layouts, is_leaf=is_layout)
    }
    kept = exceptions(config, names.values(), num_layers)
    whole = {name for name in names.values() if all((i, name) in kept for i in range(num_layers))}
    shared = list(rules.axes("sequence"))
    if config.fp8_amax_scope == "global":
        shared += rules.axes("batch")
    sites = {}
    for path, product in products.items():
        if names[path] in whole:
            continue
        together = [p for p in products if names[p] == names[path]]
        sites[path] = Fp8Site(
            name=names[path],
            inputs=product.inputs,
            experts=product.experts,
            recipe=recipe,
            input_axes=_axes(region, shared, [within[p] for p in together], product, inputs=True),
            gradient_axes=_axes(
                region, shared, [within[p] for p in together], product, inputs=False
            ),
        )
    delayed = None
    if config.fp8 == "delayed":
        delayed = DelayedScaling(
            products=tuple(sorted(set(names.values()))),
            num_layers=num_layers,
            history_length=config.fp8_amax_history_len,
            algorithm=config.fp8_amax_compute_algo,
            formats=(recipe.forward, recipe.backward),
            tokens=tokens,
        )
    return Fp8Plan(
        sites=sites,
        layouts={path: within[path] for path in sites},
        bf16=frozenset(pair for pair in kept if pair[1] not in whole),
        region=region,
        gathers_in_layer=gathers_in_layer,
        reduction=reduction,
        delayed=delayed,
    )


def product_names(
    config: PrecisionConfig, products: Mapping[str, Product] | None
) -> dict[str, str]:
    """Per weight of a layer, the name of its product; of those that may be in FP8.

    Args:
        config: the section.
        products: see :func:`make_fp8_plan`.

    Raises:
        ConfigError: there are none.
    """
    names = {
        path: _full_name(path, product)
        for path, product in (products or {}).items()
        if config.fp8_experts or not product.experts
    }
    if not names:
        raise ConfigError(
            f"precision.fp8 is {config.fp8}, but the model names no matrix products: its weights "
            "need product=Product(...) (jaxtron/layers/parameter.py); or set precision.fp8 to null"
        )
    return names


def _full_name(path: str, product: Product) -> str:
    module = path.rpartition("/")[0]
    return f"{module}/{product.name}" if module else product.name


def _axes(
    region: Region,
    shared: Sequence[str],
    layouts: Sequence[ParamLayout],
    product: Product,
    *,
    inputs: bool,
) -> tuple[str, ...]:
    """Mesh axes that split the product's input, or the gradient of its output.

    They are those that split the weight's input dimensions, or its output dimensions, and
    ``shared``. The rows of experts come from all devices that share the experts, and members of
    ``tensor`` may route different tokens.
    """
    used = set(shared)
    for layout in layouts:
        experts, dims = layout.model_axes[: product.experts], layout.model_axes[product.experts :]
        own = dims[: product.inputs] if inputs else dims[product.inputs :]
        used |= {axis for axes in (*experts, *own) for axis in axes}
    if product.experts:
        used.add("tensor")
    return region.live([axis for axis in AXES if axis in used])
