"""Launching for real: subprocesses, fake CPU devices, a coordinator on this machine."""

import json
import os
import signal
import time

import jax
import pytest

from jaxtron.errors import LaunchError
from jaxtron.launch import LaunchPlan, RuntimeConfig
from jaxtron.launch.initialize import _check_resolution, initialize, launch
from tests.launch.two_processes import free_port, run_processes, slurm_envs

PSUM = """
import json, os, signal
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtron.launch import RuntimeConfig
from jaxtron.launch.initialize import launch, shutdown

caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
plan = launch(RuntimeConfig(cpu_devices=4, initialization_timeout_s=60))
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, P("data"))
x = jax.make_array_from_callback((8,), sharding, lambda i: np.arange(8.0)[i])
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x * x, "data"), mesh=mesh,
                              in_specs=P("data"), out_specs=P()))(x)
os.kill(os.getpid(), signal.SIGTERM)
print(json.dumps({"process": jax.process_index(), "of": jax.process_count(),
                  "devices": jax.device_count(), "local": jax.local_device_count(),
                  "sum": float(total[0]), "signals": caught}))
shutdown()
"""


def test_two_slurm_tasks_of_four_devices_compute_together_and_keep_their_signal_handlers():
    results = run_processes(["-c", PSUM], slurm_envs(2), timeout_s=100)
    for process, result in enumerate(results):
        assert result.returncode == 0, result
        line = next(text for text in result.stdout.splitlines() if text.startswith("{"))
        assert json.loads(line) == {
            "process": process,
            "of": 2,
            "devices": 8,
            "local": 4,
            "sum": float(sum(i * i for i in range(8))),
            "signals": [signal.SIGTERM],
        }


ALONE = """
import sys
from jaxtron.launch import RuntimeConfig
from jaxtron.launch.initialize import launch
launch(RuntimeConfig(cpu_devices=1, coordinator_address=sys.argv[1], num_processes=2,
                     process_id=int(sys.argv[2]), initialization_timeout_s=5))
"""


@pytest.mark.parametrize("process, missing", [(0, 1), (1, 0)])
def test_a_process_alone_gives_up_and_names_the_coordinator_and_the_missing_one(process, missing):
    address = f"localhost:{free_port()}"
    begin = time.monotonic()
    [result] = run_processes(["-c", ALONE, address, str(process)], [{}], timeout_s=40)
    assert result.returncode not in (0, None), result
    assert f"at {address} within 5 s: missing process ids {missing}" in result.stderr
    assert time.monotonic() - begin >= 5


FLAGS = """
import os
import jax
from jaxtron.launch import RuntimeConfig
from jaxtron.launch.initialize import launch
launch(RuntimeConfig(xla_flags={%r: 1}, cpu_devices=3, matmul_precision="high",
                     compilation_cache_dir="cache"))
print(jax.device_count(), jax.config.jax_default_matmul_precision,
      os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
jax.jit(lambda x: x + 1)(jax.numpy.ones(3))
"""


def test_settings_reach_xla_and_jax_although_jax_was_imported_before(tmp_path):
    for given, fraction in (({}, "0.92"), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5")):
        [result] = run_processes(
            ["-c", FLAGS % "xla_cpu_enable_fast_math"], [given], timeout_s=60, cwd=tmp_path
        )
        assert result.returncode == 0, result
        assert result.stdout.split() == ["3", "high", fraction]
    assert any((tmp_path / "cache").iterdir())
    # XLA stops at flags that it does not know, so it did read ours.
    [result] = run_processes(["-c", FLAGS % "xla_no_such_flag"], [{}], timeout_s=60, cwd=tmp_path)
    assert result.returncode != 0 and "xla_no_such_flag" in result.stderr


@pytest.mark.parametrize(
    "plan, runtime, what",
    [
        (LaunchPlan(), RuntimeConfig(cpu_devices=3), "runtime.cpu_devices = 3"),
        (LaunchPlan(), RuntimeConfig(xla_flags={"xla_a": 1}), "runtime.xla_flags"),
        (LaunchPlan(local_device_ids=(1,)), RuntimeConfig(), "the choice of local GPUs = 1"),
        (
            LaunchPlan(num_processes=2, coordinator_address="localhost:1"),
            RuntimeConfig(),
            "the number of processes = 2",
        ),
    ],
)
def test_settings_that_come_too_late_are_refused(plan, runtime, what):
    assert jax.device_count() == 8
    with pytest.raises(LaunchError, match=f"{what}.* comes too late"):
        initialize(plan, runtime)


def test_a_second_launch_that_changes_nothing_is_accepted(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    assert jax.device_count() == 8
    assert launch(RuntimeConfig(cpu_devices=8)).num_processes == 1


def test_a_coordinator_name_that_means_this_node_is_refused_on_the_others():
    plan = LaunchPlan(
        num_processes=2,
        process_id=1,
        coordinator_address="127.0.0.1:9",
        num_nodes=2,
        on_first_node=False,
    )
    with pytest.raises(LaunchError, match=r"resolves to 127\.0\.0\.1 on this node"):
        _check_resolution(plan, "127.0.0.1")


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    runtime = RuntimeConfig(compilation_cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(LaunchError, match=r"runtime\.compilation_cache_dir"):
        initialize(LaunchPlan(), runtime)


def test_gpus_that_no_flag_was_measured_on_are_told_once_a_job(caplog):
    initialize(LaunchPlan(), RuntimeConfig(), compute_capability="10.0")
    assert caplog.text.count("compute capability 10.0") == 1
    plan = LaunchPlan(process_id=1)
    initialize(plan, RuntimeConfig(), compute_capability="10.0")
    assert caplog.text.count("compute capability 10.0") == 1
