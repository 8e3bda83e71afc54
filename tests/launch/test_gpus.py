import pytest

from jaxtron.launch import gpus
from jaxtron.launch.gpus import VisibleGpus, visible_gpus


@pytest.mark.parametrize(
    "env, driver, expected",
    [
        ({}, ["9.0", "9.0"], VisibleGpus(2, "9.0")),
        ({"CUDA_VISIBLE_DEVICES": "2,3,7"}, ["9.0"] * 8, VisibleGpus(3, "9.0")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, ["9.0"] * 8, VisibleGpus(1, "9.0")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["9.0"], VisibleGpus(0, None)),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["9.0"], VisibleGpus(0, None)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ["9.0"], VisibleGpus(0, None)),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ["9.0"] * 2, VisibleGpus(1, "9.0")),
        ({}, ["8.0", "9.0"], VisibleGpus(2, None)),
        ({"JAX_PLATFORMS": "cpu"}, ["9.0"], VisibleGpus(0, None)),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["9.0"], VisibleGpus(1, "9.0")),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(monkeypatch, env, driver, expected):
    monkeypatch.setattr(gpus, "_ask_driver", lambda: driver)
    assert visible_gpus(env) == expected
