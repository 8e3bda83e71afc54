"""The breakdown of a hand-made trace."""

import gzip
import json

import pytest

from jaxtron.bench.breakdown import breakdown, kind_of, read_trace
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention"),
        ("attention_backward_mosaic_gpu_kernel", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "gemm"),
        ("gemm_gate_up_mosaic_gpu_kernel", "gemm"),
        ("MemcpyD2D", "copy"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("input_reduce_fusion", "other compute"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


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
