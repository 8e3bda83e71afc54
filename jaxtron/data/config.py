"""Configuration of the training data."""

from typing import Any, Literal

from jaxtron.config.fields import key, refuse_url, section


@section
class DataConfig:
    """Where the data comes from and how it is cut into rows."""

    source: str = key(
        "indexed",
        "indexed (Megatron .bin/.idx), chat (JSON Lines of conversations or texts), synthetic, or "
        "module:function of your own.",
    )
    source_options: dict[str, Any] = key(
        {}, "Keyword arguments for the function that `source` names; only for your own source."
    )
    paths: list[str | float | list[Any]] = key(
        [],
        "Prefixes of .bin/.idx pairs, which are read once; or a blend [weight, prefix, weight, "
        "prefix, ...], where a list of either form may stand for a prefix; for the source chat: "
        "JSON Lines files.",
    )
    train_paths: list[str | float | list[Any]] = key(
        [], "As paths, for training alone; the sets are then used whole and `split` is not."
    )
    valid_paths: list[str | float | list[Any]] = key([], "As train_paths, for evaluation.")
    test_paths: list[str | float | list[Any]] = key([], "As train_paths, for the test set.")
    valid_sets: dict[str, list[str | float | list[Any]]] = key(
        {},
        "More sets for evaluation, {name: paths or blend}, each used whole and reported as "
        "eval_loss/name; eval_loss is the validation split's or, without one, that of all of them.",
    )
    split: str | float = key(
        "969,30,1", "Shares of train, valid and test in each of `paths`, by number of documents."
    )
    seq_length: int = key(help="Tokens per row.", ge=1)
    tokenizer: str | None = key(
        None, "Tokenizer of the data: `byte`, a tokenizer.json or its folder, or a *.model file."
    )
    eod_token: int | None = key(None, "Id that ends a document; null: the tokenizer's.", ge=0)
    reset_position_ids: bool = key(False, "Count positions from the start of each document.")
    reset_attention_mask: bool = key(False, "Attend only within a document.")
    eod_mask_loss: bool = key(False, "No loss on the prediction that follows an end of document.")
    fim_rate: float = key(
        0.0,
        "Fill-in-the-middle: probability that a document of a training row is rearranged.",
        ge=0,
        le=1,
    )
    fim_spm_rate: float = key(
        0.5, "Share of the suffix-first form among them; the others: prefix first.", ge=0, le=1
    )
    fim_tokens: dict[str, str | int] = key(
        {}, "{prefix:, suffix:, middle:}, each an id or the text of one token of the tokenizer."
    )
    chat_template: str | dict[str, str] = key(
        "chatml",
        "Text around the messages of the source chat: chatml, llama3, or {header:, end:, start:, "
        "after:} with {role} in the header.",
    )
    packing: Literal["none", "first_fit", "best_fit"] = key(
        "none",
        "How the source chat puts whole documents into rows: one a row, each in the first row with "
        "room, or the longest first where they leave the least room.",
    )
    overlong: Literal["error", "truncate", "drop"] = key(
        "error", "What the source chat does with a document longer than seq_length."
    )
    dataloader_type: Literal["single", "cyclic"] = key(
        "single",
        "single: the dataset's own order, once; cyclic: every epoch in another random order.",
    )
    cache_dir: str | None = key(
        None, "Folder that keeps the computed sample order between runs; null: compute it anew."
    )
    num_workers: int = key(
        0, "Processes that read rows; 0: threads of this process do, mostly the faster way.", ge=0
    )
    num_threads: int = key(1, "Threads that read rows ahead; 0: read when asked.", ge=0)
    prefetch: int = key(2, "Batches read ahead.", ge=1)

    def __post_init__(self) -> None:
        """Refuse a cache that cannot be memory-mapped."""
        refuse_url("data.cache_dir", self.cache_dir)
