"""What a row says about documents: loss mask, position ids, segment ids.

A row of a packed set holds the ends of one document, whole ones and the start of another. An
end-of-document token (eod) belongs to the document that it ends. Three switches, independent of
each other, say what is made of the boundaries (names as in Megatron)::

    tokens                5 6 E 7 8 9 E 4
    segment_ids           0 0 0 1 1 1 1 2    reset_attention_mask: attend within a document only
    position_ids          0 1 2 0 1 2 3 0    reset_position_ids: positions count from its start
    loss_mask             1 1 0 1 1 1 0 1    eod_mask_loss: no loss where the input token is eod
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = dict[str, NDArray]


def segment_ids(tokens: NDArray, eod: int) -> NDArray[np.int32]:
    """Number of the document, within the row, that each token belongs to, `[seq]`, from 0."""
    ends = np.asarray(tokens) == eod
    return (np.cumsum(ends) - ends).astype(np.int32)


def position_ids(tokens: NDArray, eod: int) -> NDArray[np.int32]:
    """Position of each token within its document, `[seq]`, from 0.

    The document that the row starts in counts from the start of the row.
    """
    tokens = np.asarray(tokens)
    index = np.arange(tokens.size)
    starts = np.zeros(tokens.size, dtype=np.int64)
    starts[1:] = np.where(tokens[:-1] == eod, index[1:], 0)
    return (index - np.maximum.accumulate(starts)).astype(np.int32)


@dataclass(frozen=True)
class RowFormat:
    """How S + 1 consecutive tokens become a row.

    Attributes:
        eod: id of the end-of-document token; needed by the three switches.
        pad: id whose predictions carry no loss; it is fed to the model as id 0.
        reset_position_ids: rows carry `position_ids`.
        reset_attention_mask: rows carry `segment_ids`.
        eod_mask_loss: the prediction after eod carries no loss (the one *of* eod does).
    """

    eod: int | None = None
    pad: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        if self.eod is None and self.needs_eod:
            raise ValueError("the reset and mask switches need the id of the eod token")

    @property
    def needs_eod(self) -> bool:
        """Whether any switch is on that looks for end-of-document tokens."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss

    def row(self, text: NDArray) -> Row:
        """The row of `text`, integer `[seq + 1]`.

        Returns:
            `tokens` and `labels` int32 `[seq]`, `loss_mask` float32 `[seq]`, and with the matching
            switch `position_ids` / `segment_ids` int32 `[seq]`.
        """
        text = np.asarray(text).astype(np.int32)
        tokens, labels = text[:-1], text[1:]
        loss_mask = np.ones(tokens.size, dtype=np.float32)
        row: Row = {}
        if self.eod is not None:
            if self.eod_mask_loss:
                loss_mask[tokens == self.eod] = 0.0
            if self.reset_position_ids:
                row["position_ids"] = position_ids(tokens, self.eod)
            if self.reset_attention_mask:
                row["segment_ids"] = segment_ids(tokens, self.eod)
        if self.pad is not None:
            loss_mask[labels == self.pad] = 0.0
            text = np.where(text == self.pad, np.int32(0), text)
            tokens, labels = text[:-1], text[1:]
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, **row}
