"""What tests of preprocessing write, and a reader that knows the file layout alone."""

import json
import struct
from pathlib import Path

import numpy as np
import tokenizers as hf

FIXED = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def read_raw(prefix: Path) -> tuple[list[list[int]], list[int], int]:
    """(sequences, document index, dtype code) of a pair of files."""
    idx, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    code = idx[17]
    count, documents = struct.unpack_from("<QQ", idx, 18)
    lengths = struct.unpack_from(f"<{count}i", idx, 34)
    index = struct.unpack_from(f"<{documents}q", idx, 34 + 12 * count)
    values = np.frombuffer(tokens, FIXED[code])
    assert values.size == sum(lengths)
    ends = np.cumsum(lengths)
    return [values[e - n : e].tolist() for e, n in zip(ends, lengths)], list(index), code


def write_lines(path: Path, *lines: object) -> Path:
    """Bytes as they are, anything else as JSON; a newline after each."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def texts(*values: str) -> list[dict[str, str]]:
    return [{"text": value} for value in values]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write_vocabulary(path: Path, size: int) -> Path:
    """A tokenizer of words w0, w1, … with these ids and no end of document."""
    vocab = {f"w{i}": i for i in range(size)}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path
