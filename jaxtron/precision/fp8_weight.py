"""Weights in FP8, as the layers' matrix products read them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

Backend = Literal["xla", "te"]


@dataclass(frozen=True)
class Fp8Recipe:
    """How tensors become FP8; the same for every product of a run.

    Attributes:
        forward: format of activations and weights.
        backward: format of gradients.
        backend: who multiplies (``fp8_product.py``).
        on_gpu: whether FP8 products run in hardware; elsewhere they are computed in fp32 from the
            same FP8 values.
    """

    forward: Any
    backward: Any
    backend: Backend
    on_gpu: bool


@dataclass(frozen=True)
class Fp8Site:
    """One matrix product of a layer.

    Attributes:
        name: ``attention/qkv``.
        inputs: dimensions of its weights that are summed over.
        experts: whether the first dimension, before these, numbers experts.
        recipe: how its tensors become FP8.
        input_axes: mesh axes over which the largest magnitude of the input is taken.
        gradient_axes: the same for the gradient of the output.
    """

    name: str
    inputs: int
    experts: bool
    recipe: Fp8Recipe
    input_axes: tuple[str, ...]
    gradient_axes: tuple[str, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "amax"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Fp8Gradient:
    """What is differentiated in place of an FP8 weight, and its gradient.

    As an input both are zeros that no product reads. Their cotangents are the gradient of the
    weight before it was quantised, and what was measured in passing.

    Attributes:
        weight: fp32, in the shape of the weight.
        amax: ``[2]`` largest magnitudes of the product's input and of its output's gradient, fp32;
            None when nobody asks. All weights of a product get the same.
    """

    weight: jax.Array
    amax: jax.Array | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "transposed", "scale", "scales", "gradient"],
    meta_fields=["site"],
)
@dataclass(frozen=True)
class Fp8Weight:
    """A weight ``[*in, *out]`` in FP8, as bits. Stacked layers add a leading dimension to leaves.

    Attributes:
        values: uint8 ``[*in, *out]``; of experts ``[experts, *in, *out]``.
        transposed: uint8 ``[*out, *in]`` or ``[experts, *out, *in]``, the same as the forward
            product reads them; None: to be made where it is used (a weight that is gathered there).
        scale: of the values, scalar; the weights of one product share it.
        scales: ``[2]`` given scales of the product's input and of its output's gradient; None:
            each is computed from the tensor itself.
        gradient: what is differentiated; None inside a product.
        site: the product it belongs to.
    """

    values: jax.Array
    transposed: jax.Array | None
    scale: jax.Array
    scales: jax.Array | None
    gradient: Fp8Gradient | None
    site: Fp8Site

    @property
    def shape(self) -> tuple[int, ...]:
        """``[*in, *out]``."""
        return self.values.shape


def is_fp8(leaf: Any) -> bool:
    """Whether ``leaf`` is a weight in FP8 (for ``is_leaf`` of tree functions)."""
    return isinstance(leaf, Fp8Weight)


def is_fp8_gradient(leaf: Any) -> bool:
    """Whether ``leaf`` is the gradient of a weight in FP8 (for ``is_leaf``)."""
    return isinstance(leaf, Fp8Gradient)


def map_gradients(f: Callable[..., jax.Array], grads: Any, *others: Any) -> Any:
    """``f`` of every gradient of a weight, whether the weight is in FP8 or not.

    ``others`` are trees with one entry per weight, passed on to ``f``; what was measured stays.
    """

    def apply(g: Any, *rest: Any) -> Any:
        return Fp8Gradient(f(g.weight, *rest), g.amax) if is_fp8_gradient(g) else f(g, *rest)

    return jax.tree.map(apply, grads, *others, is_leaf=is_fp8_gradient)


def weight_gradients(grads: Any) -> Any:
    """Gradients of weights alone, one array each."""
    return jax.tree.map(
        lambda g: g.weight if is_fp8_gradient(g) else g, grads, is_leaf=is_fp8_gradient
    )
