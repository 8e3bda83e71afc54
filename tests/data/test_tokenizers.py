"""Tokenizers: ids, special tokens, refusals. Expected ids are worked out by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers as hf

from jaxtron.data.tokenizers import load_tokenizer, train_bpe
from jaxtron.errors import ConfigError, DataError

WORDS = {"[UNK]": 0, "red": 1, "blue": 2, "</s>": 3, "<stop>": 4, "<pad>": 5}


def write_word_tokenizer(folder: Path, vocab: dict[str, int] = WORDS, **files: object) -> Path:
    """A tokenizer.json with one id per word, and the given JSON files beside it."""
    folder.mkdir(exist_ok=True)
    tokenizer = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_byte_tokenizer_is_utf8_with_256_as_end_of_document():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé€") == [97, 0xC3, 0xA9, 0xE2, 0x82, 0xAC]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert tokenizer.decode([97, 256, 0xC3, 0xA9]) == "a<|endoftext|>é"
    assert tokenizer.decode([0xC3, 97]) == "\ufffda"


def test_lone_surrogates_are_replaced_and_a_pair_is_one_character():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("a\ud800b") == [97, 0xEF, 0xBF, 0xBD, 98]
    assert tokenizer.encode(json.loads(r'"\ud83d\ude00"')) == [0xF0, 0x9F, 0x98, 0x80]


def test_hugging_face_folder_and_file_give_the_same_ids(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words")
    for spec in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(spec))
        assert tokenizer.encode("blue red\tgreen") == [2, 1, 0]
        assert tokenizer.decode([2, 1]) == "blue red"
        assert tokenizer.name == str(spec)


def test_batch_encoding_equals_one_by_one(tmp_path):
    tokenizer = load_tokenizer(write_word_tokenizer(tmp_path / "words"))
    assert tokenizer.encode_batch(["red red blue", "", "blue"]) == [[1, 1, 2], [], [2]]


def test_truncation_and_padding_stored_in_the_file_are_not_applied(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words")
    library = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding(length=4, pad_id=5)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("red red red blue") == [1, 1, 1, 2]
    assert tokenizer.encode("red") == [1]


def test_no_special_token_is_added_by_the_files_template(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words")
    library = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = hf.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 3)]
    )
    library.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("red") == [1]


@pytest.mark.parametrize(
    "files, eod",
    [
        ({}, 3),  # "</s>", a well-known name
        ({"tokenizer_config": {"eos_token": "<stop>"}}, 4),
        ({"tokenizer_config": {"eos_token": {"content": "<stop>", "lstrip": False}}}, 4),
        ({"special_tokens_map": {"eos_token": "<stop>"}}, 4),
        (
            {
                "tokenizer_config": {"eos_token": "<stop>"},
                "special_tokens_map": {"eos_token": "red"},
            },
            4,
        ),
        ({"tokenizer_config": {"eos_token": None}}, 3),
    ],
)
def test_end_of_document_comes_from_the_files_then_from_well_known_names(tmp_path, files, eod):
    assert load_tokenizer(write_word_tokenizer(tmp_path / "words", **files)).eod == eod


def test_explicit_end_of_document_wins_over_the_files(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words", tokenizer_config={"eos_token": "<gone>"})
    assert load_tokenizer(folder, eod_token="<stop>").eod == 4


def test_padding_is_taken_from_the_files_and_never_guessed(tmp_path):
    assert load_tokenizer(write_word_tokenizer(tmp_path / "a")).pad is None
    named = write_word_tokenizer(tmp_path / "b", tokenizer_config={"pad_token": "<pad>"})
    assert load_tokenizer(named).pad == 5


def test_tokenizer_without_end_of_document_says_none(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words", {"[UNK]": 0, "red": 1})
    assert load_tokenizer(folder).eod is None


def test_vocab_size_is_above_the_largest_id_even_with_gaps(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words", {"[UNK]": 0, "red": 70000})
    assert load_tokenizer(folder).vocab_size == 70001


def test_special_token_that_the_vocabulary_lacks_is_refused(tmp_path):
    folder = write_word_tokenizer(tmp_path / "words", tokenizer_config={"eos_token": "<gone>"})
    with pytest.raises(DataError, match=r"tokenizer_config\.json names eos_token '<gone>'"):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match="--eod-token '<none>'"):
        load_tokenizer(folder, eod_token="<none>")
    with pytest.raises(ConfigError, match="--eod-token '<none>'"):
        load_tokenizer("byte", eod_token="<none>")


def test_missing_or_damaged_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match="no tokenizer at 'llama3'"):
        load_tokenizer("llama3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path / "empty")
    damaged = tmp_path / "tokenizer.json"
    damaged.write_text('{"version"')
    with pytest.raises(DataError, match=r"tokenizer\.json is not a readable tokenizer\.json"):
        load_tokenizer(damaged)
    folder = write_word_tokenizer(tmp_path / "words")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("token", [-1, 257])
def test_decoding_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(DataError, match=f"token id {token} is outside .* 0 to 256"):
        load_tokenizer("byte").decode([97, token])


def test_trained_bpe_merges_the_most_frequent_pair_first(tmp_path):
    # "ab" three times, with a space before it twice: (a, b) is the first and only merge.
    tokenizer = train_bpe(["ab ab ab"], 258, tmp_path / "bpe")
    assert tokenizer.vocab_size == 258
    assert tokenizer.eod == 0
    assert tokenizer.encode("ab") == [257]
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.decode(tokenizer.encode("ab é\n\U0001f600 ")) == "ab é\n\U0001f600 "


def test_trained_bpe_is_the_same_file_in_every_process(tmp_path):
    script = (
        "import sys; from jaxtron.data.tokenizers import train_bpe\n"
        "texts = [' '.join(str(i * 7919 % 1000) for i in range(3000))]\n"
        "train_bpe(texts, 400, sys.argv[1])"
    )
    for name in ("one", "two"):
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / name)],
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": str(len(name) + ord(name[0]))},
        )
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert one == two


def test_trained_folder_loads_in_transformers_with_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    text = "def f(x):\n    return x + 1  # é\n" * 20
    tokenizer = train_bpe([text], 300, tmp_path / "bpe")
    other = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "bpe"))
    assert other(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert other.eos_token_id == tokenizer.eod


def test_training_refuses_a_tiny_vocabulary_and_no_text(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size 256: .* at least 257"):
        train_bpe(["a"], 256, tmp_path / "bpe")
    with pytest.raises(DataError, match="every document is empty"):
        train_bpe(["", ""], 300, tmp_path / "bpe")
    assert not (tmp_path / "bpe").exists()


def test_sentencepiece_model_round_trips_and_names_its_end_of_document(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = "the cat sat on the mat and the dog sat on the log"
    for prefix, eos in (("with", 2), ("without", -1)):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([text] * 20),
            model_prefix=str(tmp_path / prefix),
            vocab_size=40,
            hard_vocab_limit=False,
            eos_id=eos,
            pad_id=-1,
            minloglevel=2,
        )
    tokenizer = load_tokenizer(tmp_path / "with.model")
    assert tokenizer.decode(tokenizer.encode("the dog sat")) == "the dog sat"
    assert tokenizer.encode_batch(["the dog", ""]) == [tokenizer.encode("the dog"), []]
    assert (tokenizer.eod, tokenizer.pad) == (2, None)
    without = load_tokenizer(tmp_path / "without.model")
    assert without.eod is None
    assert load_tokenizer(tmp_path / "without.model", eod_token="<s>").eod == 1
    with pytest.raises(ConfigError, match="'<none>' is not a piece"):
        load_tokenizer(tmp_path / "with.model", eod_token="<none>")
    (tmp_path / "tokenizer.model").write_bytes((tmp_path / "with.model").read_bytes())
    (tmp_path / "with.model").rename(tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).encode("the dog") == tokenizer.encode("the dog")


def test_damaged_sentencepiece_model_is_a_clear_error(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "x.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"x\.model is not a readable SentencePiece model"):
        load_tokenizer(tmp_path / "x.model")


def test_sentencepiece_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.model").write_bytes(b"never read")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path / "x.model")
