"""The breakdown of a hand-made trace."""

import gzip
import json

import pytest

from jaxtron.bench.breakdown import breakdown, by_device, kind_of, read_trace
from jaxtron.errors import DataError

META = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
    {"ph": "M", "pid": 1, "tid": 8, "name": "thread_name", "args": {"name": "Stream #8"}},
    {"ph": "M", "pid": 1, "tid": 9, "name": "thread_name", "args": {"name": "XLA Ops"}},
]


def kernel(name, start, length, tid=7):
    return {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": start, "dur": length}


EVENTS = [
    *META,
    kernel("nvjet_tst_128x256", 0, 100),
    kernel("ncclDevKernel_AllGather", 80, 60, tid=8),  # 40 of it alone
    kernel("loop_add_fusion", 150, 50),  # 10 idle before it
    kernel("fused computation", 0, 200, tid=9),  # no kernel, a summary line
]


def test_a_hand_made_trace_is_broken_down():
    found = breakdown(EVENTS)
    assert found.total == pytest.approx(200e-6)
    assert found.busy == pytest.approx(
        {"gemm": 100e-6, "communication": 60e-6, "other compute": 50e-6}
    )
    assert found.exposed_communication == pytest.approx(40e-6)
    assert found.idle == pytest.approx(10e-6)
    assert found.kernels[0] == ("nvjet_tst_128x256", pytest.approx(100e-6), 1)
    assert "0.10 ms  50.0 %" in "\n".join(found.lines(steps=1))


def test_exposed_time_is_told_by_collective():
    more = [
        kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 190, 30, tid=8),  # 20 alone
        kernel("ncclDevKernel_SendRecv", 10, 40, tid=8),  # all of it beside a product
        kernel("ncclDevKernel_Unknown", 215, 10, tid=8),  # 10, of which 5 beside another
    ]
    found = breakdown([*EVENTS, *more])
    assert found.exposed == pytest.approx(
        {"AllGather": 40e-6, "ReduceScatter": 20e-6, "SendRecv": 0, "other": 10e-6}
    )
    assert found.exposed_communication == pytest.approx(65e-6)
    assert found.computing == pytest.approx(150e-6)
    lines = found.lines(steps=1)
    start = next(i for i, line in enumerate(lines) if line.startswith("exposed"))
    rows = [line.split()[0] for line in lines[start + 1 :]]
    assert rows == ["AllGather", "ReduceScatter", "other", "idle"]


def test_the_card_that_waits_is_shown():
    other = {"name": "/device:GPU:1"}
    meta = [
        {**e, "pid": 2, **({"args": other} if e["name"] == "process_name" else {})} for e in META
    ]
    faster = [kernel("nvjet", 0, 60), kernel("ncclDevKernel_AllGather", 60, 80, tid=8)]
    events = [*EVENTS, *meta, *({**e, "pid": 2} for e in faster)]
    in_ms = [
        {**e, "ts": 1000 * e["ts"], "dur": 1000 * e["dur"]} if "ts" in e else e for e in events
    ]
    rows = by_device(in_ms, steps=2)
    assert [row.split() for row in rows[1:]] == [
        ["GPU", "0", "75.00", "20.00", "5.00"],
        ["GPU", "1", "30.00", "40.00", "0.00"],
    ]
    assert by_device(EVENTS, steps=1) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("attention_backward_mosaic_gpu_kernel", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "gemm"),
        ("gemm_gate_up_mosaic_gpu_kernel", "gemm"),
        ("MemcpyD2D", "copy"),
        ("MemcpyP2P", "communication"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("input_reduce_fusion", "other compute"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[")[:-9]],
    ids=["no gzip", "nothing in it", "cut off"],  # gzip's header has the time
)
def test_a_file_that_is_no_trace_is_refused_by_name(content, tmp_path):
    (tmp_path / "host.trace.json.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"host\.trace\.json\.gz is no trace"):
        read_trace(tmp_path)


def test_a_trace_is_read_from_its_folder(tmp_path):
    with pytest.raises(DataError, match="no trace"):
        read_trace(tmp_path)
    (tmp_path / "plugins").mkdir()
    with gzip.open(tmp_path / "plugins" / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": EVENTS}, file)
    assert breakdown(read_trace(tmp_path)).total == pytest.approx(200e-6)


def test_a_trace_without_gpu_kernels_is_refused():
    with pytest.raises(DataError, match="no kernels of GPU 1"):
        breakdown(EVENTS, device=1)
