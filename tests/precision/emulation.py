"""FP8 arithmetic in NumPy, written from the formats' definitions."""

import ml_dtypes
import numpy as np

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def scale(amax: float, fmt: str) -> np.float32:
    """What one unit of the 8-bit value stands for."""
    exact = np.float32(amax) / np.float32(LARGEST[fmt])
    return np.float32(1) if amax == 0 else np.float32(exact.astype(ml_dtypes.bfloat16))


def quantised(x: np.ndarray, fmt: str, by: np.float32 | None = None) -> np.ndarray:
    """``x`` rounded to the nearest of ``scale * 8-bit value``, as fp64."""
    s = scale(np.max(np.abs(x)), fmt) if by is None else by
    limit = LARGEST[fmt]
    values = np.clip(x.astype(np.float32) * (np.float32(1) / s), -limit, limit)
    return values.astype(DTYPES[fmt]).astype(np.float64) * np.float64(s)


def linear(
    x: np.ndarray, w: np.ndarray, g: np.ndarray, backward: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``x w`` of matrices, and its derivatives for the output's gradient ``g``."""
    qx, qw, qg = quantised(x, "e4m3"), quantised(w, "e4m3"), quantised(g, backward)
    return qx @ qw, qg @ qw.T, qx.T @ qg
