"""Fill-in-the-middle: documents rearranged so that a model learns to write between two texts.

Source: Bavarian et al. 2022, arXiv:2207.14255. A document is cut at two places drawn uniformly and
independently into prefix, middle and suffix, any of which may be empty, and written as ::

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle      (their second variant)

where the words in brackets are one token each. As in Megatron's FIM dataset a document here is what
a row holds between two end-of-document tokens, these tokens stay where documents end, and the row
is then cut to its length: with n documents rearranged it loses its last 3 n tokens. Other than
there, the cuts fall between tokens and not between characters, so that no text is decoded and no
token changes, and what is drawn depends on (seed, row number) alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.config import DataConfig
from jaxtron.data.tokenizers import load_tokenizer
from jaxtron.errors import ConfigError

# Sets this stream of random numbers apart from others of the same seed.
_STREAM = 0xF11


@dataclass(frozen=True)
class FIMTokens:
    """Ids of the tokens that announce the three parts."""

    prefix: int
    suffix: int
    middle: int


def rearrange(document: NDArray, begin: int, end: int, spm: bool, tokens: FIMTokens) -> NDArray:
    """The document `[length]` with the middle `[begin, end)` put last, `[length + 3]`."""
    prefix, middle, suffix = np.split(document, [begin, end])
    if spm:
        parts = [[tokens.prefix, tokens.suffix], suffix, [tokens.middle], prefix, middle]
    else:
        parts = [[tokens.prefix], prefix, [tokens.suffix], suffix, [tokens.middle], middle]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rearranges the documents of rows.

    Attributes:
        rate: probability that a document is rearranged.
        spm_rate: probability that one that is has the SPM form.
        tokens: the ids of the three tokens.
        eod: id that ends a document.
        seed: of the draws, below 2^32.
    """

    rate: float
    spm_rate: float
    tokens: FIMTokens
    eod: int
    seed: int

    def __call__(self, text: NDArray, index: int) -> NDArray[np.int64]:
        """The tokens `[seq + 1]` of row `index` rearranged, `[seq + 1]`."""
        # RandomState and not Generator: its streams are the same in every version of NumPy.
        rng = np.random.RandomState([self.seed, _STREAM, index & 0xFFFFFFFF, index >> 32])
        pieces: list[NDArray] = []
        for piece in np.split(text, np.flatnonzero(text == self.eod) + 1):
            ended = piece.size > 0 and piece[-1] == self.eod
            document, end = (piece[:-1], piece[-1:]) if ended else (piece, piece[:0])
            pieces += [self._draw(document, rng), end]
        return np.concatenate(pieces)[: text.size].astype(np.int64)

    def _draw(self, document: NDArray, rng: np.random.RandomState) -> NDArray:
        if document.size == 0 or rng.random_sample() >= self.rate:
            return document
        spm = rng.random_sample() < self.spm_rate
        begin, end = sorted(rng.randint(0, document.size + 1, size=2).tolist())
        return rearrange(document, begin, end, spm, self.tokens)


def fill_in_the_middle(
    config: DataConfig, *, eod: int | None, vocab_size: int, seed: int
) -> FillInTheMiddle | None:
    """The transformation that the `data` section asks for; None with `data.fim_rate` 0.

    Raises:
        ConfigError: its tokens are missing, are not three different ids of the model, or are not
            single tokens of the tokenizer; or no end-of-document token is known.
    """
    if config.fim_rate == 0:
        return None
    if eod is None:
        raise ConfigError(
            f"data.fim_rate is {config.fim_rate}: it needs the id that ends a document; set "
            "data.eod_token, or data.tokenizer to a tokenizer that has one"
        )
    names = ("prefix", "suffix", "middle")
    if set(config.fim_tokens) != set(names):
        raise ConfigError(
            f"data.fim_tokens names {', '.join(config.fim_tokens) or 'nothing'}; with "
            f"data.fim_rate {config.fim_rate} it must give {', '.join(names)}, each "
            "an id or the text of a token"
        )
    ids = {name: _token_id(config, name, vocab_size) for name in names}
    if len({*ids.values(), eod}) < 4:
        raise ConfigError(
            f"data.fim_tokens: {ids} and the end of a document {eod} are not three different ids "
            "beside that one"
        )
    return FillInTheMiddle(config.fim_rate, config.fim_spm_rate, FIMTokens(**ids), eod, seed)


def _token_id(config: DataConfig, name: str, vocab_size: int) -> int:
    key, value = f"data.fim_tokens.{name}", config.fim_tokens[name]
    if isinstance(value, int):
        if not 0 <= value < vocab_size:
            raise ConfigError(f"{key} is {value}, but the model has ids 0 to {vocab_size - 1}")
        return value
    if config.tokenizer is None:
        raise ConfigError(f"{key} is the text {value!r}: set data.tokenizer, or give the id")
    ids = load_tokenizer(config.tokenizer).encode(value)
    if len(ids) != 1:
        raise ConfigError(
            f"{key}: {value!r} is {len(ids)} tokens of data.tokenizer {config.tokenizer}; give the "
            "text of one token, or its id"
        )
    return ids[0]
