"""Attention written out in NumPy float64, row by row and head by head, and its gradients."""

import numpy as np


def visible_keys(
    queries: int, keys: int, causal: bool, window: int | None, segments: np.ndarray | None
) -> np.ndarray:
    """Boolean [queries, keys] for one row; ``segments``: one number a token, shared by both."""
    visible = np.ones((queries, keys), bool)
    for i in range(queries):
        for j in range(keys):
            if causal and j > i:
                visible[i, j] = False
            if window is not None and j <= i - window:
                visible[i, j] = False
            if segments is not None and segments[i] != segments[j]:
                visible[i, j] = False
    return visible


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray
) -> np.ndarray:
    """``visible`` [batch, query, key]; queries without keys give zeros."""
    out = np.zeros(q.shape)
    for b, head, probabilities, group in _heads(q, k, scale, visible):
        out[b, :, head] = probabilities @ v[b, :, group].astype(np.float64)
    return out


def attention_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray, dout: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of ``sum(attention * dout)`` by the closed form of softmax's derivative."""
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b, head, p, group in _heads(q, k, scale, visible):
        dv[b, :, group] += p.T @ dout[b, :, head]
        dp = dout[b, :, head] @ v[b, :, group].astype(np.float64).T
        ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) * scale
        dq[b, :, head] += ds @ k[b, :, group]
        dk[b, :, group] += ds.T @ q[b, :, head]
    return dq, dk, dv


def _heads(q: np.ndarray, k: np.ndarray, scale: float, visible: np.ndarray):
    """(row, head, probabilities [query, key], group) of every row and head."""
    repeats = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for head in range(q.shape[2]):
            group = head // repeats
            scores = scale * q[b, :, head].astype(np.float64) @ k[b, :, group].T
            weights = np.where(visible[b], np.exp(np.minimum(scores, 300)), 0)
            total = weights.sum(-1, keepdims=True)
            yield b, head, weights / np.where(total == 0, 1, total), group
