"""The command ``train-tokenizer``: what it refuses before it reads text."""

import pytest

from jaxtron.data.__main__ import main
from jaxtron.errors import ConfigError


@pytest.mark.parametrize(
    "output, why",
    [
        ("text", "Not a directory"),
        ("text/deeper", "Not a directory"),
        ("folder.json", "Is a directory"),
        ("/proc/bpe", "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_a_tokenizer_is_trained(
    tmp_path, output, why
):
    (tmp_path / "text").write_text("a file")
    (tmp_path / "folder.json").mkdir()
    arguments = ["--input", str(tmp_path / "absent.jsonl"), "--vocab-size", "300", "--overwrite"]
    with pytest.raises(ConfigError, match=f"output .*{why}"):
        main(["train-tokenizer", *arguments, "--output", str(tmp_path / output)])
    assert {path.name for path in tmp_path.iterdir()} == {"text", "folder.json"}
