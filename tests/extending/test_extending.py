"""What ``docs/extending.md`` shows, taken from the page and done from outside the package."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from jaxtron.data.build import build_datasets
from jaxtron.data.loader import batches
from jaxtron.errors import ConfigError
from jaxtron.program import Program
from tests.parity.harness import assert_close_leaves, drawn_state, make_batch, make_config, rows_of
from tests.program.forward import random_params

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``my_package`` with the modules of the page, on ``sys.path``."""
    root = tmp_path_factory.mktemp("outside")
    (root / "my_package").mkdir()
    (root / "my_package" / "__init__.py").touch()
    for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (root / name).write_text(code)
    sys.path.insert(0, str(root))
    yield
    sys.path.remove(str(root))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


def settings(section: str) -> Any:
    """The YAML block of the page that begins with ``section``."""
    (block,) = re.findall(rf"```yaml\n({section}:.*?)```", PAGE.read_text(), re.DOTALL)
    return yaml.safe_load(block)[section]


@pytest.mark.usefixtures("package")
def test_a_dataset_and_an_optimizer_from_outside_train() -> None:
    config = make_config(
        model={"num_layers": 1},
        parallel={"fsdp": 2, "tensor": 2},
        data=settings("data"),
        train={"global_batch_size": 8, "steps": 30},
        optimizer={**settings("optimizer"), "min_lr": 0.0, "clip_grad": 1.0},
    )
    program = Program(config, jax.devices()[:4])
    datasets = build_datasets(
        config.data,
        vocab_size=100,
        seed=0,
        train_samples=30 * 8,
        valid_samples=0,
        test_samples=0,
    )
    # starts at 3; row 1 counts in fours
    np.testing.assert_array_equal(datasets.train[1]["tokens"][:4], [3, 7, 11, 15])
    state = program.init_state()
    losses = []
    rows = program.placement.rows
    for batch in batches(datasets.train, global_batch_size=8, start_sample=0, rows=rows):
        before = state["params"]["layers"]["mlp"]["up"].sum()
        state, metrics = program.train_step(state, program.place(batch))
        losses.append(float(metrics["loss"]))
        assert float(before) != float(state["params"]["layers"]["mlp"]["up"].sum())
    assert len(losses) == 30
    assert losses[-1] < losses[0] / 3  # each row continues with certainty after two tokens
    # Lion keeps one moment; it is stored like its parameter.
    params = jax.tree.leaves(state["params"])
    moments = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if leaf.ndim]
    assert [m.shape for m in moments] == [p.shape for p in params]
    assert all(m.sharding == p.sharding for m, p in zip(moments, params, strict=True))


@pytest.mark.usefixtures("package")
def test_what_cannot_be_imported_is_named() -> None:
    config = make_config(optimizer={"name": "my_package.lion:lyon"})
    with pytest.raises(ConfigError, match=r"optimizer.name=my_package.lion:lyon cannot be imp"):
        Program(config, jax.devices()[:1])


def numpy_layer(x: np.ndarray, weights: Any, config: Any) -> np.ndarray:
    """The parallel layer in float64, with one query group a head and no positions."""
    y = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.layernorm_epsilon)
    y = y * weights["norm"]["weight"]
    q = np.einsum("sh,hnd->nsd", y, weights["attention"]["query"])
    k, v = np.einsum("sh,hcnd->cnsd", y, weights["attention"]["key_value"])
    scores = np.einsum("nsd,ntd->nst", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tri(x.shape[0], dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    attended = np.einsum("nst,ntd,ndh->sh", shares, v, weights["attention"]["output"])
    gate, up = np.einsum("sh,hcf->csf", y, weights["mlp"]["up"])
    return x + attended + (gate / (1 + np.exp(-gate)) * up) @ weights["mlp"]["down"]


@pytest.mark.usefixtures("package")
def test_a_model_from_outside_computes_its_formula_on_every_mesh() -> None:
    decoder = importlib.import_module("my_package.parallel_decoder").ParallelDecoder
    results = []
    for parallel in (
        {},
        {"fsdp": 2, "tensor": 4, "data_sharding": "optim_grads_params"},
        {"data": 2, "tensor": 2, "fsdp": 2, "sequence_parallel": False},
    ):
        config = make_config(
            model={"num_layers": 2, "num_query_groups": 8, "position_embedding_type": "none"},
            parallel=parallel,
            train={"global_batch_size": 8, "num_microbatches": 2},
        )
        devices = None if parallel else jax.devices()[:1]
        program = Program(config, devices, model=decoder(config.model))
        assert "norm" in program.model.shapes["layers"]
        batch = make_batch(config)
        loss, _, grads = jax.jit(program.loss_and_gradients)(
            random_params(program), rows_of(program, batch)
        )
        results.append((float(loss), jax.tree.map(np.asarray, grads)))

    params = jax.tree.map(lambda a: np.asarray(a, np.float64), random_params(program))
    losses = []
    for row in range(8):
        x = params["embedding"]["word"][batch["tokens"][row]]
        for layer in range(2):
            x = numpy_layer(
                x, jax.tree.map(lambda a, i=layer: a[i], params["layers"]), config.model
            )
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.model.layernorm_epsilon)
        x = x * params["final_norm"]["weight"]
        logits = x @ params["output"]["weight"][:100].T
        log_z = np.log(np.sum(np.exp(logits), -1))
        losses.append(log_z - logits[np.arange(16), batch["labels"][row]])
    expected = np.sum(np.array(losses) * batch["loss_mask"]) / batch["loss_mask"].sum()

    for loss, grads in results:
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert_close_leaves(grads, results[0][1], 2e-5, "gradient")


@pytest.mark.usefixtures("package")
def test_a_model_from_outside_starts_the_same_on_every_mesh() -> None:
    decoder = importlib.import_module("my_package.parallel_decoder").ParallelDecoder
    states = []
    for parallel, devices in (({}, 1), ({"fsdp": 2, "tensor": 2}, 4)):
        config = make_config(model={"num_layers": 1}, parallel=parallel)
        program = Program(config, jax.devices()[:devices], model=decoder(config.model))
        states.append(jax.tree.map(np.asarray, drawn_state(program)))
    jax.tree.map(np.testing.assert_array_equal, *states)
