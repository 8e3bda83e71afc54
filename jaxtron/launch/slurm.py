"""What SLURM's environment says about this process: which task of which step it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtron.errors import LaunchError
from jaxtron.launch.node_list import expand_node_list

# Each fact and the variables that may carry it, best first. Those of the step (one `srun`) count
# before those of the job: inside `salloc`, SLURM_NTASKS is the job's, while the shell is one task.
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_TASK = ("SLURM_PROCID",)
_LOCAL = ("SLURM_LOCALID",)
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_REQUIRED = (_JOB, _TASKS, _TASK, _LOCAL, _NODES)

# Linux hands out local ports up to 60999; above them a port is most likely free on the first node.
_FIRST_PORT, _PORTS = 61440, 4096


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step, as ``srun`` describes it."""

    job_id: int
    step_id: int
    num_tasks: int
    task_id: int
    local_id: int
    node_id: int | None
    nodes: tuple[str, ...]
    tasks_on_node: int
    gpus_per_task: int | None
    gpus_on_node: int | None

    @property
    def coordinator_address(self) -> str:
        """First node of the step and a port that follows from the job and step numbers.

        Every task computes the same address; the port lies in 61440..65535.
        """
        port = _FIRST_PORT + (self.job_id + self.step_id) % _PORTS
        return f"{self.nodes[0]}:{port}"


@dataclass(frozen=True)
class SlurmGap:
    """SLURM variables are there, but do not describe a task."""

    found: tuple[str, ...]
    missing: tuple[str, ...]


def read_slurm(env: Mapping[str, str]) -> SlurmTask | SlurmGap | None:
    """The task that this process is.

    Returns:
        None outside SLURM; a :class:`SlurmGap` in a shell of a job (``salloc``, a batch script
        without ``srun``, a remote login to an allocated node).

    Raises:
        LaunchError: a variable holds what SLURM would not write.
    """
    found = {names: _first(env, names) for names in _REQUIRED}
    present = tuple(hit[0] for hit in found.values() if hit)
    if not present:
        return None
    missing = tuple(names[0] for names, hit in found.items() if hit is None)
    if not missing and _in_batch_script(env):
        # The batch script itself looks like task 0 of all the job's tasks, but nobody started the
        # others.
        missing = (_STEP[0],)
    if missing:
        return SlurmGap(present, missing)
    return _read_task(env)


def _read_task(env: Mapping[str, str]) -> SlurmTask:
    num_tasks, task_id, local_id = (_integer(env, names) for names in (_TASKS, _TASK, _LOCAL))
    if not 0 <= task_id < num_tasks:
        raise LaunchError(
            f"SLURM_PROCID is {task_id}, but the step has {num_tasks} tasks "
            f"({_found(env, _TASKS)[0]}): unset the SLURM_ variables of the other step, or give "
            "runtime.num_processes and runtime.process_id"
        )
    nodes = expand_node_list(_found(env, _NODES)[1])
    node_id = _optional_integer(env, ("SLURM_NODEID",))
    return SlurmTask(
        job_id=_integer(env, _JOB),
        step_id=_optional_integer(env, _STEP) or 0,
        num_tasks=num_tasks,
        task_id=task_id,
        local_id=local_id,
        node_id=node_id,
        nodes=nodes,
        tasks_on_node=max(_tasks_on_node(env, num_tasks, len(nodes), node_id), local_id + 1),
        gpus_per_task=_gpu_count(env.get("SLURM_GPUS_PER_TASK")),
        gpus_on_node=_gpu_count(env.get("SLURM_GPUS_ON_NODE")),
    )


def _tasks_on_node(
    env: Mapping[str, str], num_tasks: int, num_nodes: int, node_id: int | None
) -> int:
    """Tasks of the step on this node, from ``4(x2),3`` where that agrees with the task count."""
    hit = _first(env, _TASKS_PER_NODE)
    counts: list[int] = []
    for entry in hit[1].split(",") if hit else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) == num_tasks and len(counts) == num_nodes:
        if len(set(counts)) == 1:
            return counts[0]
        if node_id is not None and node_id < num_nodes:
            return counts[node_id]
    return -(-num_tasks // num_nodes)


def _in_batch_script(env: Mapping[str, str]) -> bool:
    step = (*_STEP, _TASKS[0], _NODES[0])
    return env.get("ENVIRONMENT") == "BATCH" and not any(env.get(name) for name in step)


def _gpu_count(value: str | None) -> int | None:
    """Number in ``4`` or ``h100:4``; None for anything else (several types, unset)."""
    match = re.fullmatch(r"(?:[\w.-]+:)?(\d+)", value or "")
    return int(match[1]) if match else None


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str] | None:
    return next(((name, env[name]) for name in names if env.get(name, "").strip()), None)


def _found(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    hit = _first(env, names)
    assert hit is not None, "read_slurm looked for it"
    return hit


def _integer(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    name, value = _found(env, names)
    if not value.strip().isdecimal():
        raise LaunchError(f"{name} is {value!r}, not a number: SLURM sets it; do not change it")
    return int(value)


def _optional_integer(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return _integer(env, names) if _first(env, names) else None
