"""Files and rows equal, byte for byte, those that megatron-core 0.16.1 itself made.

The digests were recorded from its IndexedDatasetBuilder and BlendedMegatronDatasetBuilder, given
the documents, paths, split, sizes and seed below.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from jaxtron.data.build import build_datasets
from jaxtron.data.config import DataConfig
from jaxtron.data.indexed import IndexedDatasetWriter

VOCAB_SIZE, SEQ_LENGTH, SEED, SPLIT = 1000, 32, 1234, "80,15,5"
SIZES = (300, 40, 8)


def documents(count, step):
    """Sequences of each document; most have one, every fifth has two."""
    for d in range(count):
        length = (7 * d * d + 3 * d) % 50 + 1
        sequence = (d * step + np.arange(length)) % 997
        yield [sequence, sequence[:3]] if d % 5 == 4 else [sequence]


@pytest.fixture(name="corpora", scope="module")
def _corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    for name, count, step in (("a", 90, 31), ("b", 200, 57)):
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for document in documents(count, step):
                writer.add_document(document)
    return folder


def digest(*parts):
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()[:16]


@pytest.mark.parametrize("name, expected", [("a", "65f2e5783c892b89"), ("b", "556612595e38b2da")])
def test_files(corpora, name, expected):
    pair = [Path(corpora / f"{name}{ending}").read_bytes() for ending in (".idx", ".bin")]
    assert digest(*pair) == expected


@pytest.mark.parametrize(
    "paths, expected",
    [
        (["a"], [(325, "fa00591c6e5aeecc"), (48, "46ef39b8361e6185"), (10, "6bff327a66d881d9")]),
        (
            [0.3, "a", 0.7, "b"],
            [(300, "224ab27c76c5952b"), (40, "31bb4994ee00747a"), (9, "58ea1f331550b143")],
        ),
        (["a", "b"], [(75, "d319ee71aaa81268"), (10, "7a1459c209be4657"), (2, "b92a664bb868ad3f")]),
    ],
)
def test_rows(corpora, paths, expected):
    sizes = SIZES if len(paths) != 2 else tuple(n // 4 for n in SIZES)  # one epoch only
    built = build_datasets(
        DataConfig(
            paths=[str(corpora / p) if isinstance(p, str) else p for p in paths],
            split=SPLIT,
            seq_length=SEQ_LENGTH,
        ),
        vocab_size=VOCAB_SIZE,
        seed=SEED,
        train_samples=sizes[0],
        valid_samples=sizes[1],
        test_samples=sizes[2],
    )
    got = []
    for dataset in (built.train, built.valid, built.test):
        rows = [dataset[k] for k in range(len(dataset))]
        arrays = [row[key].astype("<i4").tobytes() for row in rows for key in ("tokens", "labels")]
        got.append((len(rows), digest(*arrays)))
    assert got == expected
