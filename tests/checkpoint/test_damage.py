"""A flipped bit anywhere is found: by loading if it could do harm, by ``verify`` always."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtron.checkpoint import steps
from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.checkpoint.config import CheckpointConfig
from jaxtron.checkpoint.meta import META_PATH
from jaxtron.checkpoint.verify import verify_step
from jaxtron.errors import CheckpointError
from tests.checkpoint.states import abstract, assert_bitwise, flip_bit, mesh

# Orbax's own records outside the manifest; nothing that is loaded depends on them.
UNLISTED = {"_CHECKPOINT_METADATA", "commit_success.txt", "manifest.json"}
STEP = 7

# Orbax drops its other pending reads when one fails; Python says so when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def tree() -> dict:
    rng = np.random.default_rng(0)
    big = rng.standard_normal((64, 16), np.float32)  # over OCDBT's 1 KiB limit for inline values
    return {
        "params": {"big": jnp.asarray(big), "half": jnp.asarray(big[:40], jnp.bfloat16)},
        "step": jnp.int32(STEP),
    }


@pytest.fixture(autouse=True)
def collect_dropped_reads():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("pristine")
    with Checkpointer(CheckpointConfig(dir=str(path))) as checkpointer:
        checkpointer.save(STEP, tree(), {"consumed_samples": 3})
    return path


@pytest.fixture
def folder(pristine, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(pristine, copy)
    return copy


def restore(folder, **keys):
    checkpointer = Checkpointer(CheckpointConfig(dir=str(folder), **keys))
    return checkpointer.restore(STEP, abstract(tree(), mesh(1, 1)))[0]


def load_error(folder) -> str | None:
    """The message if loading is refused; otherwise what was loaded is what was saved."""
    try:
        got = restore(folder)
    except CheckpointError as error:
        return str(error)
    assert_bitwise(got, tree())
    return None


def test_a_sound_checkpoint_has_no_problems(folder):
    report = verify_step(folder / str(STEP))
    assert report.problems == ()
    assert report.arrays == 3 and report.files >= 8


def test_a_flipped_bit_in_any_file_is_found(folder):
    root = folder / str(STEP)
    found_on_load = set()
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        name = str(file.relative_to(root))
        size = file.stat().st_size
        for offset in {0, size // 3, (2 * size) // 3, size - 1}:
            flip_bit(file, offset, bit=3)
            message = load_error(folder)
            if message is not None:
                found_on_load.add(name)
                assert name.split("/")[-1] in message or "array" in message
            problems = "\n".join(verify_step(root).problems)
            assert name in UNLISTED or f"file {name} has CRC-32" in problems, name
            flip_bit(file, offset, bit=3)
    assert {META_PATH, "state/_METADATA", "state/manifest.ocdbt", "manifest.json"} <= found_on_load
    assert verify_step(root).problems == ()


def test_a_damaged_index_is_found_before_arrays_are_read(folder, monkeypatch):
    """Orbax prints a traceback for each array that it cannot find."""
    monkeypatch.setattr("jaxtron.checkpoint.checkpointer.read_state", None)  # must not be reached
    root = folder / str(STEP)
    for name in ("state/manifest.ocdbt", "state/_METADATA", "state/d/*"):
        (file,) = root.glob(name)
        flip_bit(file, file.stat().st_size // 2)
        assert f"file {file.relative_to(root)} has CRC-32" in load_error(folder)
        flip_bit(file, file.stat().st_size // 2)


def test_flipped_bits_in_an_arrays_data_name_the_array(folder):
    root = folder / str(STEP)
    # Random floats hardly compress: any file longer than the largest array holds its data.
    (data,) = [p for p in root.rglob("d/*") if p.stat().st_size > 4096]
    offsets = range(0, data.stat().st_size, data.stat().st_size // 24)
    named = 0
    for offset in offsets:
        flip_bit(data, offset)
        message = load_error(folder)
        problems = "\n".join(verify_step(root).problems)
        assert f"file {data.relative_to(root)}" in problems
        if message is not None:  # None: in the intermediate index at the end of the file
            named += 1
            assert "params/big" in message or "params/half" in message, message
            assert "array params/" in problems
        flip_bit(data, offset)
    assert named >= 0.8 * len(offsets)


def rewrite_meta(folder, **changes):
    """Change the record and give it the right checksum, as another program could."""
    import hashlib

    path = folder / str(STEP) / META_PATH
    body = json.loads(path.read_text())
    body.pop("checksum")
    body.update(changes)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**body, "checksum": hashlib.sha256(canonical).hexdigest()}))
    manifest = folder / str(STEP) / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    files[META_PATH] = {"size": path.stat().st_size, "crc32": None}
    checksum = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"files": files, "checksum": checksum}))


def wrong_digest(folder) -> dict:
    arrays = json.loads((folder / str(STEP) / META_PATH).read_text())["arrays"]
    arrays["params/half"]["digest"] = "0" * 16
    return arrays


def test_data_other_than_what_was_saved_is_found_though_every_file_is_readable(folder):
    rewrite_meta(folder, arrays=wrong_digest(folder))
    with pytest.raises(
        CheckpointError,
        match=r"1 of 3 arrays are not what was saved: params/half\. .* prune .*/run --after 6`",
    ):
        restore(folder)
    assert any("array params/half has digest" in p for p in verify_step(folder / "7").problems)


def test_verify_false_loads_without_comparing(folder):
    rewrite_meta(folder, arrays=wrong_digest(folder))
    assert_bitwise(restore(folder, verify=False), tree())


def test_a_newer_format_is_refused_by_its_number_and_writer(folder):
    rewrite_meta(folder, format_version=99, versions={"jaxtron": "12.0"})
    with pytest.raises(CheckpointError, match=r"format 99, written by jaxtron 12\.0.*up to 1"):
        restore(folder)


def test_another_programs_record_is_refused(folder):
    rewrite_meta(folder, format="other")
    with pytest.raises(CheckpointError, match=r'"format": "jaxtron-checkpoint"'):
        restore(folder)


@pytest.mark.parametrize("cut", ["meta/meta.json", "state/manifest.ocdbt"])
def test_a_missing_file_makes_a_step_incomplete(folder, cut):
    (folder / str(STEP) / cut).unlink()
    with pytest.raises(CheckpointError, match=rf"step 7 in .* is incomplete: .*{cut}"):
        restore(folder)
    assert steps.scan(folder).latest is None


def test_a_cut_file_makes_a_step_incomplete(folder):
    (data,) = [p for p in (folder / "7").rglob("d/*") if p.stat().st_size > 4096]
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(
        CheckpointError, match=f"{data.name} has {size - 1} bytes instead of {size}"
    ):
        restore(folder)


def test_without_file_checksums_arrays_are_still_verified(tmp_path):
    config = CheckpointConfig(dir=str(tmp_path), file_checksums=False)
    with Checkpointer(config) as checkpointer:
        checkpointer.save(STEP, tree(), {})
    root = tmp_path / str(STEP)
    assert verify_step(root).problems == ()
    (data,) = [p for p in root.rglob("d/*") if p.stat().st_size > 4096]
    flip_bit(data, data.stat().st_size // 2)
    assert any("array params/" in p for p in verify_step(root).problems)


def test_verify_reads_an_array_in_blocks_of_its_stored_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtron.checkpoint.store._CHUNK_BYTES", 512)
    with Checkpointer(CheckpointConfig(dir=str(tmp_path))) as checkpointer:
        checkpointer.save(STEP, tree(), {})
    read = []
    monkeypatch.setattr(
        "jaxtron.checkpoint.verify._block_sums",
        lambda block, offset: read.append(block.nbytes) or _sums(block, offset),
    )
    assert verify_step(tmp_path / str(STEP)).problems == ()
    assert len(read) > 10 and max(read) <= 512


def _sums(block, offset):
    from jaxtron.checkpoint.digest import block_sums

    return jax.jit(block_sums)(block, offset)
