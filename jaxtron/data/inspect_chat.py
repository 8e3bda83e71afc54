"""What fine-tuning on conversations will train: ``python -m jaxtron.data inspect chats.jsonl``.

The conversations are read as the source chat reads them, and stay in memory as they do there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.chat import ASSISTANT, ChatTemplate, Tokens, encode, read_conversations
from jaxtron.data.documents import find_sources
from jaxtron.data.inspect_parts import Lengths, Sample, at_even_distances, report_text, summary
from jaxtron.data.packing import PACKINGS
from jaxtron.data.tokenizers import Tokenizer

_SAMPLE_PARTS = 12
_PART_BEGIN = 60  # shown of a long part [tokens]
_PART_END = 20


@dataclass(frozen=True)
class RowFit:
    """How the documents go into rows.

    Attributes:
        seq_length: of a row [tokens].
        overlong: documents that are longer.
        longest: the ``seq_length`` that has room for every document.
        packing: the algorithm, None if none was asked for.
        rows: that the others fill with it, without those that have nothing to train on.
        places: of all rows that hold a token.
    """

    seq_length: int
    overlong: int
    longest: int
    packing: str | None
    rows: int
    places: int

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of every number."""
        longer = f"{self.overlong} (of {self.seq_length} tokens; the longest takes {self.longest})"
        facts = [("longer than a row", longer)]
        if self.packing is not None:
            share = 100 * self.places / max(1, self.rows * self.seq_length)
            others = " without the longer ones" if self.overlong else ""
            facts.append(("rows", f"{self.rows} by {self.packing}{others}, {share:.1f}% filled"))
        return facts


@dataclass(frozen=True)
class ChatReport:
    """What :func:`inspect_chats` found.

    Attributes:
        title: the inputs.
        conversations, texts: records with messages, and plain documents.
        roles: messages of each role, the most frequent first.
        trained: predictions that carry loss: trained tokens without the first of a document.
        lengths: of conversations and plain documents.
        empty: documents without a trained token, which a run leaves out.
        fit: into rows, None if no length was given.
        samples: documents at even distances, what is trained between « and ».
    """

    title: str
    conversations: int
    texts: int
    roles: dict[str, int]
    tokens: int
    trained: int
    lengths: Lengths
    empty: int
    fit: RowFit | None
    samples: list[Sample]

    def facts(self) -> list[tuple[str, str]]:
        """Name and value of every number."""
        # Quoted, so that a space too many is seen.
        roles = [
            f"{role!r} {count}{' (trained)' if role == ASSISTANT else ''}"
            for role, count in self.roles.items()
        ]
        facts = [
            ("conversations", f"{self.conversations}"),
            ("plain documents", f"{self.texts}"),
            ("messages by role", ", ".join(roles) or "none"),
            ("tokens", f"{self.tokens}"),
            ("trained tokens", f"{self.trained} ({100 * self.trained / max(1, self.tokens):.1f}%)"),
            ("tokens per document", str(self.lengths)),
        ]
        if self.empty:
            facts.append(("nothing to train", f"{self.empty} (left out by a run)"))
        if self.fit is not None:
            facts += self.fit.facts()
        if self.samples:
            facts.append(("samples", "what is trained is between « and »"))
        return facts

    def text(self) -> str:
        """The report for a terminal."""
        return report_text(self.title, self.facts(), self.lengths, self.samples)


def inspect_chats(
    inputs: Sequence[str],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    seq_length: int | None = None,
    packing: str | None = None,
    samples: int = 3,
) -> ChatReport:
    """Read conversations and report on what is trained.

    Args:
        inputs: as of :func:`~jaxtron.data.documents.find_sources`.
        template: text around messages.
        tokenizer: of the run.
        seq_length: of a row [tokens]; None: no report on rows.
        packing: a key of ``PACKINGS``, used on the documents in their order; None: rows are not
            counted.
        samples: documents to show.

    Raises:
        DataError: an input is missing or a record is malformed (file, line, reason).
    """
    places: list[str] = []
    documents: list[Tokens] = []
    roles: Counter[str] = Counter()
    texts = 0
    for record, conversation in read_conversations(find_sources(inputs)):
        if isinstance(conversation, str):
            texts += 1
        else:
            roles.update(role for role, _ in conversation)
        places.append(record.where)
        documents.append(encode(conversation, template, tokenizer))
    lengths = np.array([len(tokens) for tokens, _ in documents], np.int64)
    trained = np.array([mask[1:].sum() for _, mask in documents], np.int64)
    return ChatReport(
        title=", ".join(inputs),
        conversations=len(documents) - texts,
        texts=texts,
        roles=dict(roles.most_common()),
        tokens=int(lengths.sum()),
        trained=int(trained.sum()),
        lengths=summary(lengths),
        empty=int((trained == 0).sum()),
        fit=None if seq_length is None else _fit(lengths, trained, seq_length, packing),
        samples=[
            Sample(
                f"{places[number]}, {lengths[number]} tokens, {trained[number]} trained",
                marked(documents[number], tokenizer),
            )
            for number in at_even_distances(len(documents), samples)
        ],
    )


def _fit(
    lengths: NDArray[np.int64], trained: NDArray[np.int64], seq_length: int, packing: str | None
) -> RowFit:
    """How documents with ``lengths`` and ``trained`` tokens go into rows.

    The last token of a document is only a label and takes no place.
    """
    fits = lengths - 1 <= seq_length
    packed: list[int] = (lengths[fits & (trained > 0)] - 1).tolist()
    return RowFit(
        seq_length=seq_length,
        overlong=int((~fits).sum()),
        longest=int(lengths.max(initial=1)) - 1,
        packing=packing,
        rows=0 if packing is None else len(PACKINGS[packing](packed, seq_length)),
        places=sum(packed),
    )


def marked(document: Tokens, tokenizer: Tokenizer) -> str:
    """Text of a document with « and » around what is trained, long parts cut in their middle."""
    tokens, trained = document
    borders = np.flatnonzero(np.diff(trained)) + 1
    parts = list(zip(np.split(tokens, borders), np.split(trained, borders), strict=True))
    text = ""
    for ids, mask in parts[:_SAMPLE_PARTS]:
        if len(ids) > _PART_BEGIN + _PART_END:
            begin, end = ids[:_PART_BEGIN], ids[-_PART_END:]
            words = f"{tokenizer.decode(begin)} … {tokenizer.decode(end)}"
        else:
            words = tokenizer.decode(ids)
        text += f"«{words}»" if mask.any() else words
    return text + (" …" if len(parts) > _SAMPLE_PARTS else "")
