"""States like a trainer's, on any mesh: nested parameters, an Optax state, a step."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def mesh(*shape: int) -> Mesh:
    """A mesh with axes ``fsdp`` and ``tensor`` on the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("fsdp", "tensor"), (AxisType.Auto,) * 2, devices=devices)


def arrays(seed: int = 0, hidden: int = 16) -> dict:
    """Weights as NumPy arrays of several dtypes and ranks."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=np.float32):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    return {
        "embedding": {"weight": normal(24, hidden)},
        "layers": {
            "attention": {"qkv": normal(2, hidden, 8), "bias": normal(2, 8)},
            "mlp": {"weight": normal(2, hidden, 8, dtype=jnp.bfloat16)},
        },
        "counts": rng.integers(-(2**31), 2**31, (8, 4), np.int32),
        "mask": rng.integers(0, 2, (8, 4)).astype(bool),
        "fp8": normal(8, 4, dtype=jnp.float8_e4m3fn),
    }


def sharding(array, on: Mesh) -> NamedSharding:
    """The last two dimensions over (fsdp, tensor) where they divide."""
    spec = [None] * array.ndim
    for axis, name in zip(range(array.ndim - 1, -1, -1), ("tensor", "fsdp")):
        if array.shape[axis] % on.shape[name] == 0:
            spec[axis] = name
    return NamedSharding(on, P(*spec))


def state(on: Mesh, seed: int = 0, step: int = 7, hidden: int = 16) -> dict:
    """A trainer's state; the optimizer's moments are not zero."""
    host = arrays(seed, hidden)
    floats = {name: host[name] for name in ("embedding", "layers")}
    opt_state = OPTIMIZER.init(jax.tree.map(jnp.asarray, floats))
    moments = arrays(seed + 100, hidden)
    opt_state = optax.tree_utils.tree_set(
        opt_state, mu={k: moments[k] for k in floats}, count=jnp.int32(step)
    )
    full = {"params": host, "opt_state": opt_state, "step": jnp.int32(step)}
    return jax.tree.map(lambda a: jax.device_put(a, sharding(jnp.asarray(a), on)), full)


def abstract(like, on: Mesh):
    """The same shapes and dtypes, sharded over another mesh."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a, on)), like
    )


def assert_bitwise(got, expected) -> None:
    """Same containers, dtypes, shapes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected))
    for (path, a), b in pairs:
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes in one file fail, like on a full disk (works for root too)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def child_environment(devices: int) -> dict[str, str]:
    """Environment of a subprocess with so many CPU devices."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
