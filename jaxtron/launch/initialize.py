"""Carry out a launch plan: compiler flags, devices, and the meeting of the processes."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # no public way to ask whether devices are already in use
from jax.experimental.compilation_cache import compilation_cache

from jaxtron.errors import LaunchError
from jaxtron.launch.config import RuntimeConfig
from jaxtron.launch.gpus import VisibleGpus, visible_gpus
from jaxtron.launch.plan import LaunchPlan, is_loopback, plan_launch, split_address
from jaxtron.launch.rendezvous import roll_call
from jaxtron.launch.xla_flags import check_known, combine, table_rows, unmeasured, with_determinism

log = logging.getLogger(__name__)

# Once all processes have called in, JAX's own meeting takes moments; it aborts the interpreter when
# this is exceeded, so it is generous.
_JAX_MEETING_S = 120

MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def launch(runtime: RuntimeConfig) -> LaunchPlan:
    """Plan from the environment and initialize: what a program calls before any use of a device.

    Raises:
        LaunchError: see :func:`plan_launch` and :func:`initialize`.
        ConfigError: ``runtime.xla_flags`` has a name that is no XLA flag.
    """
    gpus = VisibleGpus() if runtime.cpu_devices is not None else visible_gpus(os.environ)
    plan = plan_launch(os.environ, runtime, visible_gpus=gpus.count)
    initialize(plan, runtime, compute_capability=gpus.compute_capability)
    return plan


def initialize(
    plan: LaunchPlan, runtime: RuntimeConfig, *, compute_capability: str | None = None
) -> None:
    """Set compiler flags and devices, and meet the other processes.

    Must run before JAX touches a device. A later call is accepted as long as it asks for nothing
    that has not been set already. Signal handlers set in Python stay in force: JAX's preemption
    service, which would take over SIGTERM, is off.

    Args:
        plan: from :func:`plan_launch`.
        runtime: cpu_devices, xla_flags, deterministic, gpu_memory_fraction, matmul_precision,
            compilation_cache_dir, initialization_timeout_s and heartbeat_timeout_s.
        compute_capability: of the GPUs, for the table of compiler flags; None: none apply.

    Raises:
        LaunchError: JAX's devices are already in use and a setting would come too late; the cache
            folder cannot be made; or the processes do not meet in time.
        ConfigError: ``runtime.xla_flags`` has a name that is no XLA flag.
    """
    for warning in plan.warnings:
        log.warning("launch: %s", warning)
    if plan.num_processes > 1 or plan.local_device_ids is not None:
        log.info("launch: %s", plan.describe())
    missing = unmeasured(compute_capability, jax.__version__)
    if missing is not None and plan.process_id == 0:
        log.warning("launch: %s", missing)
    _set_xla_flags(plan, runtime, compute_capability)
    if runtime.gpu_memory_fraction is not None and not xla_bridge.backends_are_initialized():
        os.environ.setdefault(MEMORY_FRACTION, str(runtime.gpu_memory_fraction))
    _set_devices(plan, runtime)
    if runtime.matmul_precision is not None:
        jax.config.update("jax_default_matmul_precision", runtime.matmul_precision)
    if runtime.compilation_cache_dir is not None:
        _set_cache(runtime.compilation_cache_dir)
    if plan.num_processes > 1 and not jax.distributed.is_initialized():
        _meet(plan, runtime)


def shutdown() -> None:
    """Leave the job together: wait for the other processes, then end the coordination service.

    Call it at a regular end, in every process; does nothing in a single process.
    """
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def _set_xla_flags(
    plan: LaunchPlan, runtime: RuntimeConfig, compute_capability: str | None
) -> None:
    present = os.environ.get("XLA_FLAGS", "")
    rows = table_rows(compute_capability, jax.__version__)
    overrides = runtime.xla_flags
    if runtime.deterministic:
        overrides = with_determinism(overrides)
        # Sums in the switch (NVLink SHARP) need not add in the same order every time.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
    flags, ours = combine(rows, present, overrides)
    if sorted(flags.split()) == sorted(present.split()):
        return
    _require_unused_devices("runtime.xla_flags (XLA_FLAGS)", flags)
    check_known(name for name, value in overrides.items() if value is not None)
    os.environ["XLA_FLAGS"] = flags
    measured = {row.name: f" ({row.measured})" for row in rows if ours.get(row.name) == row.value}
    if plan.process_id == 0:
        for name, value in ours.items():
            log.info("launch: XLA flag %s=%s%s", name, value, measured.get(name, ""))


def _set_devices(plan: LaunchPlan, runtime: RuntimeConfig) -> None:
    if runtime.cpu_devices is not None and not _has_cpu_devices(runtime.cpu_devices):
        _require_unused_devices("runtime.cpu_devices", runtime.cpu_devices)
        # In the environment too, for the processes that this one starts.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        # Counts before --xla_force_host_platform_device_count in XLA_FLAGS.
        jax.config.update("jax_num_cpu_devices", runtime.cpu_devices)
    if plan.local_device_ids is not None:
        ids = ",".join(map(str, plan.local_device_ids))
        if _config_value("jax_cuda_visible_devices") != ids:
            _require_unused_devices("the choice of local GPUs", ids)
            jax.config.update("jax_cuda_visible_devices", ids)


def _has_cpu_devices(count: int) -> bool:
    """Whether JAX already runs on this many CPU devices."""
    if not xla_bridge.backends_are_initialized():
        return False
    devices = jax.local_devices()
    return len(devices) == count and devices[0].platform == "cpu"


def _require_unused_devices(what: str, value: object) -> None:
    if xla_bridge.backends_are_initialized():
        raise LaunchError(
            f"{what} = {value} comes too late: JAX already uses its devices; call "
            "jaxtron.launch.initialize before anything that touches a device (jax.devices(), "
            "jax.numpy, jax.random)"
        )


def _set_cache(folder: str) -> None:
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"runtime.compilation_cache_dir is {folder!r}, which cannot be made: {error}"
        ) from error
    if _config_value("jax_compilation_cache_dir") != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        # A cache that JAX opened before keeps its folder otherwise.
        compilation_cache.reset_cache()


def _config_value(name: str) -> Any:
    return jax.config.values[name]


def _meet(plan: LaunchPlan, runtime: RuntimeConfig) -> None:
    """Roll call, then JAX's coordination service on the same port."""
    assert plan.coordinator_address is not None
    _require_unused_devices("the number of processes", plan.num_processes)
    host, port = split_address(plan.coordinator_address)
    _check_resolution(plan, host)
    roll_call(
        host,
        port,
        num_processes=plan.num_processes,
        process_id=plan.process_id,
        timeout_s=runtime.initialization_timeout_s,
    )
    # The service would take over SIGTERM, and Python's handlers would never be called.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=plan.coordinator_address,
            num_processes=plan.num_processes,
            process_id=plan.process_id,
            local_device_ids=plan.local_device_ids,
            # Its SLURM detection would give every process one GPU of its node.
            cluster_detection_method="deactivate",
            initialization_timeout=_JAX_MEETING_S,
            heartbeat_timeout_seconds=runtime.heartbeat_timeout_s,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"JAX's coordination service did not start at {plan.coordinator_address} "
            f"(process {plan.process_id}): {error}"
        ) from error


def _check_resolution(plan: LaunchPlan, host: str) -> None:
    """Refuse a coordinator whose name means this very machine, although it is another one."""
    if plan.num_nodes == 1 or plan.on_first_node is not False:
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return  # The roll call tries again and reports what it met.
    addresses = sorted({str(entry[4][0]) for entry in found})
    if addresses and all(is_loopback(address) for address in addresses):
        raise LaunchError(
            f"the coordinator {plan.coordinator_address} resolves to {', '.join(addresses)} on "
            "this node, which is not the first one and would wait for itself: mend the name's "
            "entry in /etc/hosts, or give runtime.coordinator_address an address of the first node"
        )
