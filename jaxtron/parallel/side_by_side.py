"""Microbatches of one turn, the tensor-parallel collectives of each beside products of another.

Between two blocks of a layer a tensor-parallel microbatch has nothing to multiply: the result of
the last block is scattered, normalised, and gathered for the next. Two microbatches can fill these
gaps for each other when their blocks alternate. Left alone, XLA lets them run abreast: it computes
what stands between the collectives of both in one kernel, because they share the norm's weight.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxtron.parallel.exchange import is_gather, is_scatter

Values = dict[Var | Literal, Any]


def side_by_side(function: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """``[function(x) for x in inputs]``, with the operations of all in turns.

    A turn ends before a reduce-scatter over ``tensor``, or its exchange: of a block's result,
    or backward of the gradient of its input. A barrier holds that collective back until the next
    turn's input is gathered, and the next turn's products until this turn's have ended::

        products       A0 | A1 | M0 | M1 | ...      attention and MLP of microbatches 0 and 1
        collectives       | M0 | M1 | A0 | ...      between the blocks, up to this one

    Collectives and products inside of other operations (a scan, a recomputed layer, the gated MLP's
    kernel) are not seen: their order is XLA's. The results are the same in any case.

    Args:
        function: of a tree; pure.
        inputs: trees of the same structure and shapes.
    """
    if len(inputs) == 1:
        return [function(inputs[0])]
    nested, shapes = jax.make_jaxpr(function, return_shape=True)(inputs[0])
    leaves = jax.tree.leaves(inputs[0])
    closed = jax.make_jaxpr(lambda *given: _without_calls(nested, given))(*leaves)
    jaxpr = closed.jaxpr
    given = [*jaxpr.constvars, *jaxpr.invars]
    streams: list[Values] = [
        dict(zip(given, [*closed.consts, *jax.tree.leaves(each)], strict=True)) for each in inputs
    ]
    last: tuple[Values, JaxprEqn] | None = None  # the reduce-scatter that ended the turn before
    for turn, scatter in _turns(jaxpr.eqns):
        entered, middle = _cuts(turn, scatter)
        for values in streams:
            for equation in turn[:entered]:
                _evaluate(equation, values)
            if last is not None and entered:
                _order(values, turn[entered - 1].outvars[0], last[0], last[1].invars[0])
            for equation in turn[entered:middle]:
                _evaluate(equation, values)
            if last is not None:
                _evaluate(last[1], last[0])
                if middle > entered:
                    _order(values, turn[middle - 1].outvars[0], last[0], last[1].outvars[0])
            for equation in turn[middle:]:
                _evaluate(equation, values)
            last = None if scatter is None else (values, scatter)
    results = [[_read(v, values) for v in jaxpr.outvars] for values in streams]
    return [jax.tree.unflatten(jax.tree.structure(shapes), each) for each in results]


def _without_calls(closed: ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
    """Results of a program whose calls of functions, layers for one, are traced in their place."""
    jaxpr = closed.jaxpr
    values: Values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *given], strict=True)
    )
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("jit", "pjit"):
            operands = [_read(v, values) for v in equation.invars]
            with jax.named_scope(str(equation.source_info.name_stack)):
                results = _without_calls(equation.params["jaxpr"], operands)
            values.update(zip(equation.outvars, results, strict=True))
        else:
            _evaluate(equation, values)
    return [_read(v, values) for v in jaxpr.outvars]


def _turns(equations: Sequence[JaxprEqn]) -> Iterator[tuple[Sequence[JaxprEqn], JaxprEqn | None]]:
    """Operations of each turn, and the reduce-scatter after it."""
    start = 0
    for i, equation in enumerate(equations):
        if is_scatter(equation):
            yield equations[start:i], equation
            start = i + 1
    yield equations[start:], None


def _cuts(turn: Sequence[JaxprEqn], scatter: JaxprEqn | None) -> tuple[int, int]:
    """How many operations there are up to the gather of the turn's input, and up to the first
    product of those that its result depends on."""
    needed = set() if scatter is None else {scatter.invars[0]}
    gather = product = 0
    for i in reversed(range(len(turn))):
        if not needed.isdisjoint(turn[i].outvars):
            needed.update(v for v in turn[i].invars if isinstance(v, Var))
            if turn[i].primitive.name == "dot_general":
                product = i + 1
        if is_gather(turn[i]):
            gather = i + 1
    return gather, max(gather, product)


def _order(one: Values, a: Var, other: Values, b: Var | Literal) -> None:
    """What reads one of both values waits for the other too."""
    one[a], other[b] = lax.optimization_barrier((one[a], other[b]))


def _evaluate(equation: JaxprEqn, values: Values) -> None:
    """Put the equation's results into ``values``."""
    parameters = equation.primitive.get_bind_params(equation.params)
    operands = [_read(v, values) for v in equation.invars]
    with equation.ctx.manager, jax.named_scope(str(equation.source_info.name_stack)):
        results = equation.primitive.bind(*operands, **parameters)
    if not equation.primitive.multiple_results:
        results = [results]
    values.update(zip(equation.outvars, results, strict=True))


def _read(v: Var | Literal, values: Values) -> Any:
    return v.val if isinstance(v, Literal) else values[v]
