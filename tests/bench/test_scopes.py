"""Time by part of the model: a hand-made trace of a hand-made step, and a real step's text."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxtron.bench.__main__ import _with_instructions, main
from jaxtron.bench.scopes import COMMAND_BUFFERS, operations, read_step_text, scope_of
from jaxtron.bench.step import time_step
from jaxtron.config.load import load_config
from jaxtron.errors import ConfigError, DataError
from jaxtron.launch.xla_flags import combine

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused_mul (param_0.1: f32[4]) -> f32[4] {
  %param_0.1 = f32[4]{0} parameter(0)
  ROOT %mul.1 = f32[4]{0} multiply(%param_0.1, %param_0.1), metadata={op_name="jit(step)/\
jvp(jit(block))/mlp/mul" stack_frame_id=3}
}

ENTRY %main.9 (x.1: f32[4]) -> (f32[4], f32[4]) {
  %x.1 = f32[4]{0} parameter(0), metadata={op_name="state['x']"}
  %gemm.1 = (f32[4]{0}, s8[8]{0}) custom-call(%x.1), custom_call_target="__cublas$gemm", \
metadata={op_name="jit(step)/jvp(jit(block))/attention/dot_general"}
  %part.1 = f32[4]{0} get-tuple-element(%gemm.1), index=0, metadata={scheduling_name="part.1"}
  %copy.3 = f32[4]{0} copy(%part.1), metadata={scheduling_name="copy.3"}
  %fusion.2 = f32[4]{0} fusion(%copy.3), kind=kLoop, calls=%fused_mul
  %all-gather-start.5 = ((f32[4]{0}), f32[8]{0}) all-gather-start(%fusion.2), dimensions={0}, \
metadata={op_name="jit(step)/jvp(jit(block))/attention/all_gather"}
  %again.6 = f32[4]{0} add(%fusion.2, %fusion.2), metadata={op_name="jit(step)/\
transpose(jvp(jit(block)))/checkpoint/rematted_computation/attention/add"}
  %gemm.4 = f32[4]{0} dot(%again.6, %fusion.2), metadata={op_name="jit(step)/\
transpose(jvp(jit(block)))/checkpoint/attention/dot_general"}
  %adam.7 = f32[4]{0} add(%gemm.4, %x.1), metadata={op_name="jit(step)/optimizer/add"}
  %copy.8 = f32[4]{0} copy(%x.1)
  ROOT %tuple.1 = (f32[4]{0}, f32[4]{0}) tuple(%adam.7, %copy.8)
}
"""


def kernel(name: str, start: float, length: float, instruction: str | None, tid: int = 7) -> dict:
    """An event of ``length`` milliseconds."""
    event = {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": 1e3 * start, "dur": 1e3 * length}
    return event if instruction is None else {**event, "args": {"hlo_op": instruction}}


EVENTS = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
    {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "Stream #8"}},
    kernel("nvjet_1", 0, 60, "gemm.1"),  # two kernels of one instruction
    kernel("nvjet_2", 60, 40, "gemm.1"),
    kernel("MemcpyD2D", 100, 10, "copy.3"),
    kernel("loop_multiply_fusion", 110, 30, "fusion.2"),
    kernel("ncclDevKernel_AllGather", 120, 50, "all-gather-start.5", tid=8),  # beside others
    kernel("wrapped_add", 140, 70, "again.6"),
    kernel("nvjet_1", 210, 200, "gemm.4"),
    kernel("wrapped_add", 410, 20, "adam.7"),
    kernel("MemcpyD2D", 430, 5, "copy.8"),
    kernel("nvjet_1", 435, 7, "command_buffer_1"),
    kernel("wrapped_sort", 492, 8, None),
]

# of two steps in 500 ms, so halves: attention forward 60 + 40 + 10 + 50, all kernels 500
TABLE = """
ms of a step             forward  backward  recomputed  other  sum     share    communication
attention                80.00    100.00    35.00       -      215.00  86.0 %   25.00
mlp                      15.00    -         -           -      15.00   6.0 %    -
optimizer                -        -         -           10.00  10.00   4.0 %    -
of no known instruction  -        -         -           7.50   7.50    3.0 %    -
without a scope          -        -         -           2.50   2.50    1.0 %    -
all kernels              95.00    100.00    35.00       20.00  250.00  100.0 %  25.00
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the hand-made trace and step."""
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": EVENTS}, file)
    with gzip.open(tmp_path / "step.hlo.gz", "wt") as file:
        file.write(TEXT)
    return tmp_path


def test_a_trace_that_is_read_has_no_configuration(folder: Path) -> None:
    for words in (["--config", "tiny"], ["model.num_layers=2"]):
        with pytest.raises(ConfigError, match="--read breaks down the trace in"):
            main(["profile", "--read", str(folder), *words])


def test_time_is_told_apart_by_scope_and_pass_and_none_is_dropped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = folder / "out.json"
    words = ["--read", str(folder), "--scopes", "--traced-steps", "2", "--json", str(saved)]
    assert main(["profile", *words]) == 0
    _, table, rest = capsys.readouterr().out.split("\n\n")
    assert table.split() == TABLE.split()
    assert len({len(line) for line in table.splitlines()}) == 1  # columns are aligned
    assert rest.splitlines() == [
        "of no known instruction: wrapped_sort 4.00, nvjet_1 3.50",
        "without a scope: copy.8 2.50",
    ]
    scopes = json.loads(saved.read_text())["scopes"]
    assert list(scopes)[:2] == ["attention", "mlp"]
    assert scopes["attention"] == pytest.approx(
        {"forward_ms": 80, "backward_ms": 100, "recomputed_ms": 35, "other_ms": 0}
        | {"sum_ms": 215, "communication_ms": 25}
    )
    assert sum(scope["sum_ms"] for scope in scopes.values()) == pytest.approx(250)


@pytest.mark.parametrize(
    ("op_name", "scope", "which"),
    [
        ("jit(step)/while/body/eval_jaxpr/jvp(jit(_run_block))/moe/router/bth,eh->bte/dot_general",)
        + ("moe/router", "forward"),
        ("jit(step)/shard_map/while/body/transpose(jvp(jit(_run_block)))/attention/core/dq",)
        + ("attention/core", "backward"),
        ("jit(step)/transpose(jvp(embedding))/scatter-add", "embedding", "backward"),
        ("jit(step)/jvp(loss)/while/body/eval_jaxpr/jit(_where)/select_n", "loss", "forward"),
        (
            "jit(step)/transpose(jvp(jit(_run_block)))/checkpoint/rematted_computation/norm/mul",
            "norm",
            "recomputed",
        ),
        ("jit(step)/jvp()/while/body/checkpoint/mlp/dot_general", "mlp", "forward"),
        # a derivative by hand
        (
            "jit(step)/transpose(jvp(jit(_run_block)))/moe/dispatch/experts/transpose(moe)/dispatch"
            "/experts/jvp(jit(rows_times_weights))/grouped_gemm/mpmd_map",
            "moe/dispatch/experts/grouped_gemm",
            "backward",
        ),
        ("jit(step)/optimizer/clip/jit(_where)/select_n", "optimizer/clip", "other"),
        ("jit(step)/jit(dynamic_index_in_dim)/dynamic_slice", "", "other"),
        # what XLA joins
        ("jit(step)/(clip/sum:reduce/psum:reduce/psum)", "reduce", "other"),
        ("jit(step)/jvp(rotary)/mul;jit(step)/while/body/mlp/add", "rotary", "forward"),
        ("", "", "other"),
    ],
)
def test_scope_and_pass_are_read_from_the_name_of_an_operation(
    op_name: str, scope: str, which: str
) -> None:
    assert scope_of(op_name) == (scope, which)


@pytest.fixture
def cache_key() -> Iterator[None]:
    """Undoes what a profile sets for its process."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("cache_key")
def test_a_profiled_step_keeps_its_text_with_the_parts_of_the_model_in_it(tmp_path: Path) -> None:
    experts = ["model.num_experts=4", "model.moe_router_topk=2", "train.recompute=full"]
    experts += ["model.moe_shared_expert_intermediate_size=32"]
    small = ["model.num_layers=1", "data.seq_length=32", "data.source=synthetic"]
    batch = ["train.global_batch_size=16", "train.micro_batch_size=1", "parallel.fsdp=8"]
    config = load_config("tiny", [*small, *batch, *experts])
    time_step(config, name="x", steps=1, warmup=0, xla_flags="", trace=tmp_path, traced_steps=1)
    found = set(map(scope_of, operations(read_step_text(tmp_path)).values()))
    both = ["norm", "attention", "attention/core", "attention/rotary", "moe/router", "moe/dispatch"]
    for scope in [*both, "moe/dispatch/experts", "moe/shared/mlp", "embedding", "loss/norm"]:
        assert {(scope, "forward"), (scope, "backward")} <= found, scope
    assert {("attention", "recomputed"), ("loss", "forward"), ("residual", "forward")} <= found
    for scope in ("optimizer", "optimizer/clip", "gradient_sum", "gradient_reduce", "weights"):
        assert (scope, "other") in found, scope


def test_a_trace_without_its_step_is_refused(folder: Path) -> None:
    (folder / "step.hlo.gz").unlink()
    with pytest.raises(DataError, match=r"holds no step\.hlo\.gz.*profile --scopes --trace"):
        main(["profile", "--read", str(folder), "--scopes"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.dynamic_context=true", "several executables: set it to false"),
        (f"runtime.xla_flags={{{COMMAND_BUFFERS}: FUSION}}", "it is FUSION: leave it out"),
    ],
)
def test_a_step_whose_kernels_cannot_be_told_apart_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["profile", "--config", "tiny", "--scopes", override])


def test_command_buffers_are_off_whatever_the_environment_says() -> None:
    config = _with_instructions(load_config("tiny", ["runtime.xla_flags={xla_dump_to: x}"]))
    flags, _ = combine((), f"--{COMMAND_BUFFERS}=FUSION", config.runtime.xla_flags)
    assert flags == f"--xla_dump_to=x --{COMMAND_BUFFERS}="
