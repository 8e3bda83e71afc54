"""O20: environment -> launch plan, without network or devices."""

import pytest

from jaxtron.errors import LaunchError
from jaxtron.launch import RuntimeConfig, plan_launch


def srun(task=0, tasks=8, nodes="n[01-02]", per_node=4, job="4242", **more):
    """Environment of one task as srun sets it."""
    env = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % per_node),
        "SLURM_NODEID": str(task // per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{tasks // per_node})",
    }
    return env | more


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


PORT_4242 = 61440 + 4242 - 4096  # job 4242, step 0, in a span of 4096 ports

# name, environment, runtime flags, visible GPUs ->
#   processes, process id, coordinator, local GPUs, number of warnings
TABLE = [
    ("nothing set", {}, {}, 0, 1, 0, None, None, 0),
    ("nothing set, 8 GPUs", {}, {}, 8, 1, 0, None, None, 0),
    ("login node", {"SLURM_CONF": "/etc/slurm.conf"}, {}, 0, 1, 0, None, None, 0),
    ("job id alone", {"SLURM_JOB_ID": "7"}, {}, 8, 1, 0, None, None, 1),
    (
        "salloc shell on the login node",
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},
        {},
        0,
        1,
        0,
        None,
        None,
        1,
    ),
    ("half set: no task", without(srun(3), "SLURM_PROCID"), {}, 4, 1, 0, None, None, 1),
    ("half set: empty", srun(0, SLURM_LOCALID=""), {}, 4, 1, 0, None, None, 1),
    (
        "batch script without srun",
        without(
            srun(0, ENVIRONMENT="BATCH"),
            *("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
        ),
        {},
        8,
        1,
        0,
        None,
        None,
        1,
    ),
    (
        "shell in a step of one task of a larger job",
        srun(0, tasks=1, per_node=1, nodes="n01", SLURM_NTASKS="8"),
        {},
        8,
        1,
        0,
        None,
        None,
        0,
    ),
    ("2 nodes x 1 task, first", srun(0, 2, per_node=1), {}, 8, 2, 0, "n01", None, 0),
    ("2 nodes x 1 task, second", srun(1, 2, per_node=1), {}, 8, 2, 1, "n01", None, 0),
    ("2 nodes x 4 tasks, 4 GPUs", srun(6), {}, 4, 8, 6, "n01", (2,), 0),
    ("2 nodes x 4 tasks, 1 GPU each", srun(6), {}, 1, 8, 6, "n01", (0,), 0),
    ("2 nodes x 4 tasks, no GPU", srun(6), {}, 0, 8, 6, "n01", None, 0),
    ("4 tasks share 8 GPUs", srun(7), {}, 8, 8, 7, "n01", (6, 7), 0),
    (
        "4 tasks of 4 bound GPUs each",
        srun(5, SLURM_GPUS_PER_TASK="h100:4", SLURM_GPUS_ON_NODE="16"),
        *({}, 4, 8, 5, "n01", None, 0),
    ),
    (
        "GPUs bound by the node's share",
        srun(5, SLURM_GPUS_ON_NODE="16"),
        *({}, 4, 8, 5, "n01", None, 0),
    ),
    (
        "a job's node list where the step has none",
        without(srun(6), "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
        *({}, 4, 8, 6, "n01", (2,), 0),
    ),
    (
        "uneven tasks per node",
        srun(4, 5, SLURM_NODEID="1", SLURM_LOCALID="0", SLURM_STEP_TASKS_PER_NODE="4,1"),
        *({}, 4, 5, 4, "n01", None, 0),
    ),
    (
        "GPUs not numbered from 0 are counted from 0",
        srun(6, CUDA_VISIBLE_DEVICES="4,5,6,7"),
        *({}, 4, 8, 6, "n01", (2,), 0),
    ),
    ("fake CPU devices", srun(6), {"cpu_devices": 4}, 4, 8, 6, "n01", None, 0),
    ("local GPUs by flag", srun(6), {"local_device_ids": [0, 3]}, 4, 8, 6, "n01", (0, 3), 0),
    ("one process by flag", srun(6), {"num_processes": 1}, 4, 1, 0, None, None, 0),
    (
        "all by flag, over SLURM",
        srun(6),
        {"coordinator_address": "head:5000", "num_processes": 3, "process_id": 2},
        *(4, 3, 2, "head:5000", None, 0),
    ),
    (
        "the coordinator alone by flag",
        srun(6),
        {"coordinator_address": "n01-ib:5000"},
        *(4, 8, 6, "n01-ib:5000", (2,), 0),
    ),
    (
        "all by flag, without SLURM",
        {},
        {"coordinator_address": "localhost:5000", "num_processes": 2, "process_id": 1},
        *(0, 2, 1, "localhost:5000", None, 0),
    ),
    (
        "loopback in a job of one node",
        srun(1, 2, "localhost", 2),
        {},
        0,
        2,
        1,
        "localhost",
        None,
        0,
    ),
]


@pytest.mark.parametrize(
    "env, flags, gpus, processes, process, coordinator, devices, warnings",
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_plan_from_environment(
    env, flags, gpus, processes, process, coordinator, devices, warnings
):
    plan = plan_launch(env, RuntimeConfig(**flags), visible_gpus=gpus)
    if coordinator is not None and ":" not in coordinator:
        coordinator = f"{coordinator}:{PORT_4242}"
    assert (plan.num_processes, plan.process_id) == (processes, process)
    assert plan.coordinator_address == coordinator
    assert plan.local_device_ids == devices
    assert len(plan.warnings) == warnings


def test_half_set_variables_are_named_in_the_warning():
    plan = plan_launch(without(srun(0), "SLURM_PROCID"), RuntimeConfig())
    assert "SLURM_PROCID missing" in plan.warnings[0] and "srun" in plan.warnings[0]


@pytest.mark.parametrize("job", ["0", "1", "4095", "4096", "65535", "123456789", "4294901760"])
def test_port_is_legal_and_the_same_on_every_rank(job):
    ports = {
        plan_launch(srun(task, job=job), RuntimeConfig()).coordinator_address.rpartition(":")[2]
        for task in range(8)
    }
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) <= 65535


REFUSED = [
    ("loopback, 2 nodes", srun(0, nodes="localhost,n2"), {}, 0, "localhost:.*2 nodes"),
    (
        "loopback by flag, 2 nodes",
        srun(0),
        {"coordinator_address": "127.0.1.1:5000"},
        *(0, "127.0.1.1:5000 is a loopback address.*2 nodes"),
    ),
    (
        "process id without the rest",
        {},
        {"process_id": 1},
        *(0, "process_id=1 without runtime.coordinator_address and runtime.num_processes"),
    ),
    ("flags and a shell", {"SLURM_JOB_ID": "7"}, {"num_processes": 2}, 0, "coordinator_address"),
    ("number outside", srun(6), {"num_processes": 4}, 0, r"process id 6 is outside 0\.\.3"),
    ("second of one", {}, {"num_processes": 1, "process_id": 1}, 0, "process_id is 1"),
    ("task outside the step", srun(9), {}, 0, "SLURM_PROCID is 9.*8 tasks"),
    ("not a number", srun(0, SLURM_PROCID="x"), {}, 0, "SLURM_PROCID is 'x'"),
    ("3 tasks, 4 GPUs", srun(1, 3, "n1", 3), {}, 4, "3 tasks .*share 4 visible GPUs"),
    ("4 tasks, 2 GPUs", srun(1), {}, 2, "4 tasks .*share 2 visible GPUs"),
    ("no such GPU", {}, {"local_device_ids": [4]}, 4, r"local_device_ids is \[4\]"),
    ("GPU twice", {}, {"local_device_ids": [1, 1]}, 4, r"local_device_ids is \[1, 1\]"),
    ("GPUs on CPU", {}, {"local_device_ids": [1], "cpu_devices": 2}, 0, "cpu_devices=2"),
    ("no port", srun(0), {"coordinator_address": "n1"}, 0, "'n1': give host:port"),
    ("bare IPv6", srun(0), {"coordinator_address": "fd00::1:99"}, 0, "give host:port"),
    ("port 70000", srun(0), {"coordinator_address": "n1:70000"}, 0, "port 70000 is outside"),
    ("bad node list", srun(0, nodes="n[1"), {}, 0, r"node list 'n\[1'"),
]


@pytest.mark.parametrize(
    "env, flags, gpus, message", [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_impossible_launch_is_refused(env, flags, gpus, message):
    with pytest.raises(LaunchError, match=message):
        plan_launch(env, RuntimeConfig(**flags), visible_gpus=gpus)
