"""Two processes with four devices each save together; one process restores it, and back."""

import jax
import numpy as np

from jaxtron.checkpoint import steps
from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.verify import verify_step
from tests.checkpoint.states import (
    abstract,
    arrays,
    assert_bitwise,
    child_environment,
    mesh,
    sharding,
)
from tests.launch.two_processes import free_port, run_processes

CHILD = """
import os, sys
import jax
rank, port, single, pair = int(os.environ["RANK"]), *sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
import numpy as np
from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.errors import CheckpointError
from tests.checkpoint.states import abstract, mesh
from tests.checkpoint.test_processes import host_state, place

# What one process saved on one device, restored over two processes.
reader = Checkpointer(CheckpointConfig(dir=single))
start = reader.start_point()
assert start.step == 5, start
like = abstract(host_state(), mesh(4, 2))
got, meta = reader.restore(start.step, like)
assert meta == {"consumed_samples": 5}, meta
pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(host_state()), strict=True)
for (path, array), expected in pairs:
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), path

# Saved together, twice, so that the first is deleted.
with Checkpointer(CheckpointConfig(dir=pair, keep=1)) as writer:
    assert writer.start_point() is None
    writer.save(6, got, {"consumed_samples": 6})
    writer.save(7, place(state_seed=1), {"consumed_samples": 7})
assert writer.start_point().step == 7

# Processes that see different folders are told so, all of them.
try:
    Checkpointer(CheckpointConfig(dir=pair if rank else single)).start_point()
except CheckpointError as error:
    assert "process 0: 5, process 1: 7" in str(error), error
else:
    raise AssertionError("no disagreement seen")
print("done", rank)
"""


def host_state(seed: int = 0):
    """A state of few arrays as NumPy."""
    params = arrays(seed)
    kept = {name: params[name] for name in ("embedding", "counts")}
    return {"params": kept | params["layers"]["mlp"], "step": np.int32(seed)}


def local_state(seed: int, on):
    return jax.tree.map(lambda a: jax.device_put(a, sharding(a, on)), host_state(seed))


def place(state_seed: int):
    """That state over all devices of all processes."""
    host = host_state(state_seed)
    return jax.tree.map(
        lambda a, like: jax.make_array_from_callback(a.shape, like.sharding, lambda i: a[i]),
        host,
        abstract(host, mesh(4, 2)),
    )


def test_two_processes_save_together_and_exchange_with_one(tmp_path):
    single, pair = tmp_path / "single", tmp_path / "pair"
    with Checkpointer(CheckpointConfig(dir=str(single))) as checkpointer:
        checkpointer.save(5, local_state(0, mesh(1, 1)), {"consumed_samples": 5})

    port = str(free_port())
    envs = [{**child_environment(4), "RANK": str(rank)} for rank in range(2)]
    finished = run_processes(["-c", CHILD, port, str(single), str(pair)], envs, timeout_s=180)
    assert [f.returncode for f in finished] == [0, 0], "\n".join(map(str, finished))

    assert steps.scan(pair).complete == (7,)
    assert sorted(p.name for p in pair.iterdir()) == ["7"]
    assert verify_step(pair / "7").problems == ()
    expected = local_state(1, mesh(8, 1))
    got, meta = Checkpointer(CheckpointConfig(dir=str(pair))).restore(
        7, abstract(expected, mesh(8, 1))
    )
    assert_bitwise(got, expected)
    assert meta == {"consumed_samples": 7}
