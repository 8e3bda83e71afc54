"""Conversations as token ids, and which of them are trained.

A record is one JSON object a line: ``{"messages": [{"role": "user", "content": "..."}, ...]}``, or
``{"text": "..."}``, a plain document of which every token is trained. Of a conversation the
assistant's words and the token that ends its turn are trained; headers, and what others say, are
not.
"""

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from jaxtron.data.documents import BadRecord, Record, Source, parse_object, read_blocks
from jaxtron.data.tokenizers import Tokenizer
from jaxtron.errors import ConfigError, DataError
from jaxtron.nearest import nearest

Conversation = list[tuple[str, str]] | str
"""``(role, content)`` of every message, or the text of a plain document."""

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Token ids ``[n]`` and whether each is trained."""


@dataclass(frozen=True)
class ChatTemplate:
    """The text around the messages of a conversation; ``{role}`` stands for a message's role.

    Attributes:
        start: before the first message.
        header: before a message's content.
        end: after it; trained in the assistant's turns, since it is how they stop.
        after: between ``end`` and the next header; never trained.
    """

    start: str
    header: str
    end: str
    after: str


ASSISTANT = "assistant"
"""The role whose words are trained."""

_NEAR = 0.8  # likeness from which a role is taken for a misspelt one
_SHOWN = 120  # characters of a malformed message

TEMPLATES = {
    "chatml": ChatTemplate("", "<|im_start|>{role}\n", "<|im_end|>", "\n"),
    "llama3": ChatTemplate(
        "<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""
    ),
}
"""Templates by name."""


def chat_template(given: str | dict[str, str], key: str = "data.chat_template") -> ChatTemplate:
    """The template that a key or option names: a name, or the four texts.

    Raises:
        ConfigError: no such template, or texts with other names.
    """
    if isinstance(given, str):
        if given not in TEMPLATES:
            raise ConfigError(f"{key}: no template {given!r}; {nearest(given, TEMPLATES)}")
        return TEMPLATES[given]
    fields = ("start", "header", "end", "after")
    unknown = [name for name in given if name not in fields]
    if unknown or "header" not in given or "end" not in given:
        wrong = f"has {', '.join(unknown)}" if unknown else "lacks header or end"
        raise ConfigError(
            f"{key} {wrong}: give the texts header and end (and start and after, if "
            "any) of a turn, or the name of a template: " + ", ".join(TEMPLATES)
        )
    if "{role}" not in given["header"]:
        raise ConfigError(
            f"{key} has the header {given['header']!r}, the same for all turns: put {{role}} where "
            "the role of a message stands"
        )
    return ChatTemplate(**{name: given.get(name, "") for name in fields})


def read_conversations(sources: Iterable[Source]) -> Iterator[tuple[Record, Conversation]]:
    """Every record of some files, in order, and the conversation or document that it holds.

    Raises:
        DataError: a file cannot be read, or a record is malformed (file, line, reason).
    """
    for block in read_blocks(sources):
        for record in block.records:
            try:
                yield record, parse_messages(record)
            except BadRecord as bad:
                raise DataError(bad.message) from None


def parse_messages(record: Record) -> Conversation:
    """``[(role, content), ...]`` of a conversation, or the text of a plain document.

    Raises:
        BadRecord: the record is malformed; the message says file, line and reason.
    """

    def bad(reason: str, what: str) -> BadRecord:
        return BadRecord(reason, f"{record.where}: {what}")

    value = parse_object(record)
    if "messages" not in value:
        if isinstance(value.get("text"), str):
            return str(value["text"])
        raise bad("missing_key", "has neither 'messages' nor a string under 'text'")
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise bad("bad_messages", "'messages' is not a list with at least one message")
    turns = []
    for number, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise bad(
                "bad_messages",
                f"message {number} is not an object with strings role and content: "
                + textwrap.shorten(json.dumps(message), _SHOWN),
            )
        role = message["role"]
        if role != ASSISTANT and (
            not role.strip() or get_close_matches(role.strip().lower(), [ASSISTANT], cutoff=_NEAR)
        ):
            raise bad(
                "bad_role",
                f"message {number} has the role {role!r}, of which nothing would be trained: "
                f"did you mean {ASSISTANT!r}?",
            )
        turns.append((message["role"], message["content"]))
    if all(role != ASSISTANT for role, _ in turns):
        raise bad("no_assistant", f"no message has the role {ASSISTANT!r}, so nothing is trained")
    return turns


def encode(conversation: Conversation, template: ChatTemplate, tokenizer: Tokenizer) -> Tokens:
    """Token ids of a conversation or document, and which are trained.

    Header, content, end and what follows are tokenised one by one, so the border of what is
    trained is exact. A plain document ends with the tokenizer's end of document, if it has one.
    """
    if isinstance(conversation, str):
        ids = tokenizer.encode(conversation)
        ids += [] if tokenizer.eod is None else [tokenizer.eod]
        return np.array(ids, np.int32), np.ones(len(ids), bool)
    pieces = [(template.start, False)]
    for role, content in conversation:
        trained = role == ASSISTANT
        pieces += [
            (template.header.replace("{role}", role), False),
            (content, trained),
            (template.end, trained),
            (template.after, False),
        ]
    if not template.after:
        pieces.pop()
    parts = tokenizer.encode_batch([text for text, _ in pieces])
    mask = [np.full(len(part), trained) for part, (_, trained) in zip(parts, pieces, strict=True)]
    return np.array([i for part in parts for i in part], np.int32), np.concatenate(mask)
