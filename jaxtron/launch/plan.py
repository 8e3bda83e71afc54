"""The launch plan: how many processes, which one this is, where they meet, which GPUs it has."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtron.errors import LaunchError
from jaxtron.launch.config import RuntimeConfig
from jaxtron.launch.slurm import SlurmGap, SlurmTask, read_slurm

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True)
class LaunchPlan:
    """How this process takes part in the job.

    Attributes:
        num_processes: processes of the whole job.
        process_id: number of this one, from 0.
        coordinator_address: ``host:port`` of process 0; None for a single process.
        local_device_ids: GPUs of this process, counted among those it sees; None: all of them.
        num_nodes: nodes of the job; None where nothing tells.
        on_first_node: whether process 0 runs on this node; None where nothing tells.
        source: where the plan came from, for the log.
        warnings: what the user should know.
    """

    num_processes: int = 1
    process_id: int = 0
    coordinator_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    num_nodes: int | None = 1
    on_first_node: bool | None = True
    source: str = "single process"
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for the log."""
        gpus = (
            ""
            if self.local_device_ids is None
            else f", local GPUs {', '.join(map(str, self.local_device_ids))}"
        )
        if self.num_processes == 1:
            return f"1 process ({self.source}){gpus}"
        return (
            f"process {self.process_id} of {self.num_processes} ({self.source}), "
            f"coordinator {self.coordinator_address}{gpus}"
        )


def plan_launch(
    env: Mapping[str, str], runtime: RuntimeConfig, *, visible_gpus: int = 0
) -> LaunchPlan:
    """Work out the launch from ``runtime.*`` and the environment; reads nothing else.

    A value given in ``runtime`` counts before SLURM's. SLURM variables that do not describe a task
    (a shell on an allocated node) make a single process and one warning.

    Args:
        env: the environment variables.
        runtime: coordinator_address, num_processes, process_id, local_device_ids, cpu_devices.
        visible_gpus: GPUs that this process sees.

    Raises:
        LaunchError: flags are incomplete or out of range, a variable is not what SLURM writes, the
            GPUs cannot be shared by the tasks of a node, or the coordinator is a loopback address
            in a job of several nodes.
    """
    slurm = read_slurm(env)
    task = slurm if isinstance(slurm, SlurmTask) else None
    num_processes = runtime.num_processes or (task.num_tasks if task else None)
    if num_processes == 1 or not (task or _flags(runtime)):
        return _single(runtime, slurm, visible_gpus)
    plan = _distributed(runtime, task, visible_gpus)
    _check_coordinator(plan)
    return plan


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for the machine that uses it."""
    if host.lower().rstrip(".") in _LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` (an IPv6 host in brackets, which are taken off).

    Raises:
        LaunchError: there is no host, or the port is no number in 1..65535.
    """
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    bracketed = host.startswith("[") and host.endswith("]")
    if not bare or (":" in bare and not bracketed) or not port.isdecimal():
        raise LaunchError(
            f"runtime.coordinator_address is {address!r}: give host:port of process 0, "
            "for example node1:12345 or [fd00::1]:12345"
        )
    if not 1 <= int(port) <= 65535:
        raise LaunchError(
            f"runtime.coordinator_address is {address!r}: port {port} is outside 1..65535"
        )
    return bare, int(port)


def _flags(runtime: RuntimeConfig) -> dict[str, str | int]:
    """The three keys that place a process, as far as they are given."""
    keys = {
        "coordinator_address": runtime.coordinator_address,
        "num_processes": runtime.num_processes,
        "process_id": runtime.process_id,
    }
    return {name: value for name, value in keys.items() if value is not None}


def _single(
    runtime: RuntimeConfig, slurm: SlurmTask | SlurmGap | None, visible_gpus: int
) -> LaunchPlan:
    if runtime.process_id:
        raise LaunchError(
            f"runtime.process_id is {runtime.process_id}, but the job has 1 process (number 0): "
            "set runtime.num_processes to the number of processes"
        )
    warnings: tuple[str, ...] = ()
    source = "single process"
    if runtime.num_processes == 1:
        source = "runtime.num_processes=1"
    elif isinstance(slurm, SlurmTask):
        source = f"SLURM job {slurm.job_id}, 1 task"
    elif isinstance(slurm, SlurmGap):
        warnings = (
            f"inside a SLURM job, but not one of its tasks ({', '.join(slurm.found)} set, "
            f"{', '.join(slurm.missing)} missing): running as a single process. Start the program "
            "with srun for one process per task, or set runtime.num_processes=1 to silence this.",
        )
    return LaunchPlan(
        local_device_ids=_chosen_devices(runtime, visible_gpus), source=source, warnings=warnings
    )


def _distributed(runtime: RuntimeConfig, task: SlurmTask | None, visible_gpus: int) -> LaunchPlan:
    flags = _flags(runtime)
    if task is None and len(flags) < 3:
        names = ("coordinator_address", "num_processes", "process_id")
        missing = [f"runtime.{name}" for name in names if name not in flags]
        given = ", ".join(f"runtime.{name}={value}" for name, value in flags.items())
        raise LaunchError(
            f"{given} without {' and '.join(missing)}: give all three in every process, or start "
            "the job with srun, which tells them"
        )
    from_slurm: dict[str, str | int] = {}
    if task is not None:
        from_slurm = {
            "coordinator_address": task.coordinator_address,
            "num_processes": task.num_tasks,
            "process_id": task.task_id,
        }
    values = from_slurm | flags
    num_processes, process_id = int(values["num_processes"]), int(values["process_id"])
    if process_id >= num_processes:
        raise LaunchError(
            f"process id {process_id} is outside 0..{num_processes - 1}: the job has "
            f"{num_processes} processes (runtime.num_processes and runtime.process_id, or SLURM's)"
        )
    # The tasks that SLURM counts are the processes of this job only if their numbers agree.
    same_job = task if task is not None and task.num_tasks == num_processes else None
    devices = _chosen_devices(runtime, visible_gpus)
    if devices is None and same_job is not None and runtime.cpu_devices is None:
        devices = _shared_devices(same_job, visible_gpus)
    sources = ["runtime flags"] * bool(flags)
    if task is not None and len(flags) < 3:
        sources.append(f"SLURM job {task.job_id}")
    on_first_node: bool | None = None
    if process_id == 0 or (same_job is not None and len(same_job.nodes) == 1):
        on_first_node = True
    elif same_job is not None and same_job.node_id is not None:
        on_first_node = same_job.node_id == 0
    return LaunchPlan(
        num_processes=num_processes,
        process_id=process_id,
        coordinator_address=str(values["coordinator_address"]),
        local_device_ids=devices,
        num_nodes=None if same_job is None else len(same_job.nodes),
        on_first_node=on_first_node,
        source=" over ".join(sources),
    )


def _check_coordinator(plan: LaunchPlan) -> None:
    assert plan.coordinator_address is not None
    host, _ = split_address(plan.coordinator_address)
    if is_loopback(host) and plan.num_nodes is not None and plan.num_nodes > 1:
        raise LaunchError(
            f"the coordinator {plan.coordinator_address} is a loopback address, but the job has "
            f"{plan.num_nodes} nodes, so the other nodes would wait for themselves: set "
            "runtime.coordinator_address to a name of the first node that the others can reach"
        )


def _chosen_devices(runtime: RuntimeConfig, visible_gpus: int) -> tuple[int, ...] | None:
    """``runtime.local_device_ids``, checked."""
    chosen: Sequence[int] | None = runtime.local_device_ids
    if chosen is None:
        return None
    if runtime.cpu_devices is not None:
        raise LaunchError(
            f"runtime.local_device_ids={list(chosen)} chooses GPUs, but "
            f"runtime.cpu_devices={runtime.cpu_devices} runs on the CPU: leave one of them out"
        )
    outside = [i for i in chosen if i < 0 or (visible_gpus and i >= visible_gpus)]
    if not chosen or outside or len(set(chosen)) != len(chosen):
        raise LaunchError(
            f"runtime.local_device_ids is {list(chosen)}: give different numbers among the "
            f"{visible_gpus or ''} visible GPUs, counted from 0 whatever CUDA_VISIBLE_DEVICES holds"
        )
    return tuple(chosen)


def _shared_devices(task: SlurmTask, visible_gpus: int) -> tuple[int, ...] | None:
    """GPUs of one of several tasks on a node; None: all that it sees are its own."""
    if visible_gpus == 0 or task.tasks_on_node == 1:
        return None
    if visible_gpus == 1:
        return (0,)
    bound_by_request = task.gpus_per_task == visible_gpus
    bound_by_slurm = task.gpus_on_node is not None and visible_gpus < task.gpus_on_node
    if bound_by_request or bound_by_slurm:
        return None
    if visible_gpus % task.tasks_on_node:
        raise LaunchError(
            f"{task.tasks_on_node} tasks on this node share {visible_gpus} visible GPUs, which "
            f"does not come out even: use --ntasks-per-node={visible_gpus} (or 1), or give each "
            "process its runtime.local_device_ids"
        )
    share = visible_gpus // task.tasks_on_node
    return tuple(range(task.local_id * share, (task.local_id + 1) * share))
