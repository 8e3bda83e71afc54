"""XLA's ragged exchange written out, for CPUs, which do not have it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import jaxtron.program
from jaxtron.layers.moe import dispatch_ragged
from jaxtron.layers.moe.dispatch_ragged import Route


def _written_out(rows: jax.Array, route: Route, size: int, axes: tuple[str, ...]) -> jax.Array:
    """What ``lax.ragged_all_to_all`` is documented to do, which CPUs do not have."""
    everyone, *table = (lax.all_gather(a, axes) for a in (rows, *route[:3]))
    me = lax.axis_index(axes)
    sent_from, sent, put_at = (a[:, me] for a in table)
    out = jnp.zeros((size, *rows.shape[1:]), rows.dtype)
    for sender in range(everyone.shape[0]):
        number = jnp.arange(size) - put_at[sender]
        comes = (number >= 0) & (number < sent[sender])
        out = jnp.where(comes[:, None], everyone[sender][sent_from[sender] + number], out)
    # sizes that the receiver does not expect are undefined behaviour
    return jnp.where(jnp.all(sent == route.received), out, jnp.nan)


@contextmanager
def ragged_exchange_written_out() -> Iterator[None]:
    """Within it the dispatcher ``ragged`` runs on CPUs, in whole programs too."""
    with (
        mock.patch.object(dispatch_ragged, "ragged_exchange", _written_out),
        mock.patch.object(jaxtron.program, "check_experts", return_value=None),
    ):
        yield
