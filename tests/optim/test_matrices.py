import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.models.config import ModelConfig
from jaxtron.models.decoder import Decoder
from jaxtron.optim.matrices import is_axes, matrices_of
from tests.moe.arms import AHEAD, LATENT, T_MOE

E, H, G, D, F, L = 4, 6, 2, 3, 5, 2


def pieces(axes: tuple, x: np.ndarray) -> list[np.ndarray]:
    return list(np.asarray(matrices_of(axes).split(jnp.asarray(x))))


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_query_is_one_matrix_a_layer_with_the_heads_side_by_side():
    x = numbers(L, E, H, D)
    got = pieces(("layers", "embed", "heads", "head_dim"), x)
    assert len(got) == L
    for layer in range(L):
        np.testing.assert_array_equal(got[layer], np.concatenate(list(x[layer].swapaxes(0, 1)), 1))


def test_key_and_value_are_matrices_of_their_own():
    x = numbers(L, E, 2, G, D)
    got = pieces(("layers", "embed", None, "kv_heads", "head_dim"), x)
    want = [
        np.concatenate([x[layer, :, part, head] for head in range(G)], axis=1)
        for layer in range(L)
        for part in range(2)
    ]
    np.testing.assert_array_equal(got, want)


def test_gate_and_up_are_matrices_of_their_own():
    x = numbers(L, E, 2, F)
    got = pieces(("layers", "embed", None, "mlp"), x)
    want = [x[layer, :, part] for layer in range(L) for part in range(2)]
    np.testing.assert_array_equal(got, want)


def test_the_attention_output_maps_heads_to_the_stream():
    x = numbers(L, H, D, E)
    got = pieces(("layers", "heads", "head_dim", "embed"), x)
    want = [np.concatenate([x[layer, head] for head in range(H)]) for layer in range(L)]
    np.testing.assert_array_equal(got, want)


def test_every_expert_has_its_matrix_and_the_router_is_one():
    x = numbers(L, 3, F, E)
    got = pieces(("layers", "experts", "expert_mlp", "embed"), x)
    np.testing.assert_array_equal(got, [x[i, j] for j in range(3) for i in range(L)])
    x = numbers(L, 3, E, 2, F)
    got = pieces(("layers", "experts", "embed", None, "expert_mlp"), x)
    parts = [x[i, j, :, part] for j in range(3) for i in range(L) for part in range(2)]
    np.testing.assert_array_equal(got, parts)
    router = numbers(L, 3, E)  # stored with the output first
    got = pieces(("layers", "router", "embed"), router)
    np.testing.assert_array_equal(got, list(router.swapaxes(1, 2)))


def test_all_weights_of_a_model_with_experts_are_matrices():
    """Names of dimensions that nobody knows here would quietly make vectors of the weights."""
    model = Decoder(ModelConfig(**{**T_MOE, **LATENT, **AHEAD}))
    flat = jax.tree_util.tree_leaves_with_path(model.logical, is_leaf=is_axes)
    vectors = {
        jax.tree_util.keystr(path[-2:], simple=True, separator="/")
        for path, axes in flat
        if not matrices_of(axes).is_matrix
    }
    norms = ("attention_norm", "mlp_norm", "final_norm", "query_norm", "key_value_norm")
    norms += ("embedding_norm", "hidden_norm")
    assert vectors == {f"{name}/weight" for name in norms}


@pytest.mark.parametrize(
    ("axes", "shape", "split"),
    [
        (("embed",), (E,), (1, E)),
        (("layers", "embed"), (L, E), (L, E)),
        (("layers", "heads", "head_dim"), (L, H, D), (L, H * D)),
        (("layers", None, "kv_heads", "head_dim"), (L, 2, G, D), (L * 2, G * D)),
        ((), (), (1, 1)),
    ],
)
def test_biases_and_norms_are_vectors(axes: tuple, shape: tuple, split: tuple):
    matrices = matrices_of(axes)
    assert not matrices.is_matrix
    assert matrices.split(jnp.zeros(shape)).shape == split


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("layers", "embed", None, "kv_heads", "head_dim"), (L, E, 2, G, D)),
        (("layers", "heads", "head_dim", "embed"), (L, H, D, E)),
        (("layers", "experts", "embed", None, "expert_mlp"), (L, 3, E, 2, F)),
        (("layers", "router", "embed"), (L, 3, E)),
        (("layers", None, "mlp"), (L, 2, F)),
        (("vocab", "embed"), (7, E)),
    ],
)
def test_joining_undoes_splitting(axes: tuple, shape: tuple):
    matrices, x = matrices_of(axes), numbers(*shape)
    np.testing.assert_array_equal(matrices.join(matrices.split(jnp.asarray(x)), shape), x)
