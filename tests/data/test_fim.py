"""Fill-in-the-middle, against rows written out by hand."""

import numpy as np
import pytest

from jaxtron.data.build import build_datasets
from jaxtron.data.config import DataConfig
from jaxtron.data.fim import FillInTheMiddle, FIMTokens, rearrange
from jaxtron.data.indexed import IndexedDatasetWriter
from jaxtron.data.loader import batches
from jaxtron.errors import ConfigError

PRE, SUF, MID, EOD = 91, 92, 93, 99
TOKENS = FIMTokens(prefix=PRE, suffix=SUF, middle=MID)
SEQ = 16


def transform(rate=1.0, spm_rate=0.0, seed=1):
    return FillInTheMiddle(rate=rate, spm_rate=spm_rate, tokens=TOKENS, eod=EOD, seed=seed)


@pytest.mark.parametrize(
    "begin, end, psm, spm",
    [
        (1, 3, [PRE, 1, SUF, 4, 5, MID, 2, 3], [PRE, SUF, 4, 5, MID, 1, 2, 3]),
        (0, 5, [PRE, SUF, MID, 1, 2, 3, 4, 5], [PRE, SUF, MID, 1, 2, 3, 4, 5]),
        (2, 2, [PRE, 1, 2, SUF, 3, 4, 5, MID], [PRE, SUF, 3, 4, 5, MID, 1, 2]),
        (5, 5, [PRE, 1, 2, 3, 4, 5, SUF, MID], [PRE, SUF, MID, 1, 2, 3, 4, 5]),
    ],
)
def test_the_forms_of_a_document_are_those_of_the_paper(begin, end, psm, spm):
    document = np.arange(1, 6, dtype=np.uint16)
    assert rearrange(document, begin, end, False, TOKENS).tolist() == psm
    assert rearrange(document, begin, end, True, TOKENS).tolist() == spm


def fixed_draws(monkeypatch, uniforms, cuts):
    """The draws of a row in their order, by hand."""

    class Draws:
        def __init__(self, seed):
            self.uniforms, self.cuts = iter(uniforms), iter(cuts)

        def random_sample(self):
            return next(self.uniforms)

        def randint(self, low, high, size):
            pair = next(self.cuts)
            assert (low, size) == (0, 2) and max(pair) < high
            return np.array(pair)

    monkeypatch.setattr(np.random, "RandomState", Draws)


def test_documents_of_a_row_are_rearranged_apart_and_the_row_is_cut(monkeypatch):
    """Three documents and an empty one: PSM, as it was, empty, SPM; the last six tokens go."""
    text = np.array([1, 2, 3, 4, EOD, 5, 6, EOD, EOD, 7, 8, 9, 10, 11, 12, 13, 14])
    uniforms = [0.2, 0.9, 0.7, 0.4, 0.1]  # yes, PSM; no; yes, SPM
    fixed_draws(monkeypatch, uniforms, cuts=[(3, 1), (2, 5)])
    got = transform(rate=0.5, spm_rate=0.5)(text, 0)
    whole = [PRE, 1, SUF, 4, MID, 2, 3, EOD, 5, 6, EOD, EOD]
    whole += [PRE, SUF, 12, 13, 14, MID, 7, 8, 9, 10, 11]
    assert got.tolist() == whole[: text.size]


def test_rate_zero_and_rows_without_a_document_change_nothing():
    text = np.array([1, 2, EOD, 3, 4])
    assert transform(rate=0.0)(text, 5).tolist() == text.tolist()
    assert transform()(np.array([EOD, EOD]), 5).tolist() == [EOD, EOD]


def test_seed_and_row_number_each_change_the_draws():
    text = np.arange(60)
    first, seed, row, high = (
        transform(seed=s)(text, k).tolist() for s, k in ((1, 0), (2, 0), (1, 1), (1, 2**32))
    )
    assert first == transform(seed=1)(text, 0).tolist()
    assert all(other != first for other in (seed, row, high))


def test_rates_and_cuts_are_those_asked_for():
    """Shares of the rows of one document of 4 tokens, within four standard deviations."""
    text, count = np.array([0, 1, 2, 3, EOD, EOD, EOD]), 1500

    def assert_share(hits, of, share):
        assert abs(hits / of - share) < 4 * (share * (1 - share) / of) ** 0.5

    rows = [transform(rate=0.7, spm_rate=0.2)(text, k) for k in range(count)]
    changed = [row for row in rows if row[0] == PRE]
    assert_share(len(changed), count, 0.7)
    # SPM begins with both tokens; so does PSM where the lower cut is 0, of 5 places each: 9/25.
    assert_share(sum(row[1] == SUF for row in changed), len(changed), 0.2 + 0.8 * 9 / 25)
    psm = [transform()(text, k) for k in range(count)]
    assert_share(sum(row[6] == MID for row in psm), count, 1 / 5)  # equal cuts: an empty middle


def corpus(path, documents=40):
    with IndexedDatasetWriter(path, "uint16") as writer:
        rng = np.random.default_rng(3)
        for _ in range(documents):
            writer.add_document([np.append(rng.integers(0, 90, rng.integers(3, 30)), EOD)])
        writer.finalize()
    return str(path)


def build(path, seed=1, valid=0, vocab_size=100, **keys):
    config = DataConfig(**{"seq_length": SEQ, "paths": [path], "split": "8,2", **keys})
    return build_datasets(
        config,
        vocab_size=vocab_size,
        seed=seed,
        train_samples=24,
        valid_samples=valid,
        test_samples=0,
    )


IDS = {"prefix": PRE, "suffix": SUF, "middle": MID}
ON = {"fim_rate": 1.0, "fim_tokens": IDS, "eod_token": EOD}


def test_rows_depend_on_seed_and_number_alone(tmp_path):
    path = corpus(tmp_path / "a")
    train, again, other = (build(path, seed=seed, **ON).train for seed in (1, 1, 2))
    order = [5, 0, 11, 5, 3]
    rows = {k: train[k]["tokens"].tolist() for k in order}
    assert all(again[k]["tokens"].tolist() == rows[k] for k in reversed(order))
    assert any(other[k]["tokens"].tolist() != rows[k] for k in order)
    settings = {"global_batch_size": 4, "start_sample": 0, "rows": range(4)}
    one = next(batches(train, **settings, num_threads=0))
    many = next(batches(train, **settings, num_threads=3))
    assert np.array_equal(one["tokens"], many["tokens"])


def test_labels_and_document_masks_follow_the_rearranged_tokens(tmp_path):
    path = corpus(tmp_path / "a")
    plain = build(path, eod_token=EOD).train
    train = build(path, **ON, fim_spm_rate=0.0, reset_attention_mask=True).train
    for k in range(24):
        row = train[k]
        assert np.array_equal(row["tokens"][1:], row["labels"][:-1])
        ends = np.cumsum(row["tokens"] == EOD)
        assert row["segment_ids"].tolist() == [0, *ends[:-1].tolist()]
        # Put back in order, the first whole document is the one of the row as it was.
        tokens, before = row["tokens"].tolist(), plain[k]["tokens"].tolist()
        first = tokens[: tokens.index(EOD)] if EOD in tokens else []
        if first:
            suffix, middle = first.index(SUF), first.index(MID)
            restored = first[1:suffix] + first[middle + 1 :] + first[suffix + 1 : middle]
            assert restored == before[: before.index(EOD)]


def test_evaluation_reads_documents_as_they_are(tmp_path):
    path = corpus(tmp_path / "a")
    plain, fim = build(path, valid=3).valid, build(path, valid=3, **ON).valid
    for k in range(3):
        assert np.array_equal(plain[k]["tokens"], fim[k]["tokens"])


def test_tokens_are_ids_or_texts_of_the_tokenizer(tmp_path):
    path = corpus(tmp_path / "a")
    keys = {"fim_rate": 1.0, "tokenizer": "byte", "vocab_size": 257, "eod_token": EOD}
    by_text = build(path, fim_tokens={"prefix": "[", "suffix": "\\", "middle": 93}, **keys).train
    assert by_text.transform.tokens == FIMTokens(prefix=91, suffix=92, middle=93)
    with pytest.raises(ConfigError, match=r"fim_tokens\.suffix.*'<suf>' is 5 tokens of .*byte"):
        build(path, fim_tokens={**IDS, "suffix": "<suf>"}, **keys)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"fim_tokens": {}}, r"data\.fim_tokens.*prefix, suffix, middle"),
        ({"fim_tokens": {**IDS, "pad": 1}}, r"data\.fim_tokens.*pad"),
        ({"fim_tokens": {**IDS, "middle": 100}}, r"data\.fim_tokens\.middle is 100.*0 to 99"),
        ({"fim_tokens": {**IDS, "middle": "<m>"}}, r"data\.fim_tokens\.middle.*data\.tokenizer"),
        ({"fim_tokens": {**IDS, "middle": PRE}}, r"data\.fim_tokens.*three different"),
        ({"eod_token": None}, r"data\.fim_rate.*data\.eod_token"),
        ({"source": "synthetic", "paths": []}, r"data\.fim_rate"),
    ],
)
def test_keys_that_cannot_work_are_refused_by_name(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        build(corpus(tmp_path / "a"), **{**ON, **keys})
