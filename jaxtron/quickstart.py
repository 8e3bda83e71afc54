"""``python -m jaxtron.quickstart``: the whole job on text that is on this machine.

Text, tokenizer, token files, training with evaluation and checkpoints, a stop, a resume, generated
text and a report page: each step is the command that a real run would use, and is shown.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from jaxtron.cli import run
from jaxtron.config.load import load_config
from jaxtron.data.build import build_datasets
from jaxtron.data.corpus import write_corpus
from jaxtron.errors import ConfigError, JaxtronError
from jaxtron.generate import SEPARATOR
from jaxtron.observe.report import write_report

CONFIG = "quickstart.yaml"
PROMPTS = ("def main(", "import os\n", "class ")
ENOUGH = 1.0  # nats below the unigram entropy that the evaluation should end


def quickstart_config(folder: Path, vocab_size: int, steps: int) -> dict[str, dict[str, object]]:
    """A small Llama-style model on the quickstart's tokens.

    24 rows a step can be shared by 1, 2, 3, 4, 6, 8, 12 or 24 devices.
    """
    return {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "ffn_hidden_size": 384,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": vocab_size,
            "max_position_embeddings": 128,
        },
        "data": {
            "paths": [str(folder / "tokens_text_document")],
            "split": "90,10,0",
            "seq_length": 128,
            "tokenizer": str(folder / "tokenizer"),
        },
        "train": {"steps": steps, "global_batch_size": 24},
        "optimizer": {
            "lr": 4.0e-3,
            "min_lr": 4.0e-4,
            "lr_warmup_steps": max(1, steps // 20),
        },
        "precision": {"compute": "fp32"},
        "checkpoint": {"dir": str(folder / "checkpoints"), "interval": max(1, steps // 4)},
        "eval": {"interval": max(1, steps // 8), "iters": 6},
        "observe": {"dir": str(folder / "run"), "log_interval": max(1, steps // 40)},
        "runtime": {"compilation_cache_dir": str(folder / "compiled")},
    }


def unigram_entropy(config_file: Path) -> tuple[float, int]:
    """Entropy of the tokens that evaluation predicts [nats], and their number.

    It is the loss of a model that knows how frequent each token of these very rows is and nothing
    else.
    """
    config = load_config(config_file)
    rows = config.eval.iters * config.train.global_batch_size
    valid = build_datasets(
        config.data,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        train_samples=0,
        valid_samples=rows,
        test_samples=0,
    ).valid
    if valid is None:
        raise ConfigError(f"{config_file}: the configuration has no validation split")
    counts = np.zeros(config.model.vocab_size, np.int64)
    for index in range(min(rows, len(valid))):
        row = valid[index]
        counts += np.bincount(row["labels"][row["loss_mask"] > 0], minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()), int(counts.sum())


def _command(title: str, *arguments: str, capture: bool = False) -> str:
    """Run ``python -m jaxtron.<arguments>`` in the open; its output when ``capture``."""
    module, *rest = arguments
    shown = " ".join(repr(a) if " " in a or "\n" in a else a for a in rest)
    print(f"\n== {title}\n$ jaxtron {module} {shown}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", f"jaxtron.{module}", *rest],
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise JaxtronError(f"jaxtron {module} ended with status {done.returncode} (see above)")
    return done.stdout or ""


def _prepare(folder: Path) -> None:
    """An empty folder for this run; an earlier quickstart's is replaced, nothing else."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / CONFIG).exists():
            raise ConfigError(
                f"--out {folder} holds files that no quickstart made: give another folder"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).touch()


def quickstart(folder: Path, texts: Sequence[str], *, steps: int, megabytes: float) -> float:
    """Run all steps in ``folder``; returns how far evaluation ends below unigram entropy [nats]."""
    began = time.monotonic()
    _prepare(folder)
    print("== Text from this machine", flush=True)
    corpus = write_corpus(folder / "corpus.jsonl", texts, max_bytes=int(megabytes * 2**20))
    print(f"{corpus.documents} documents, {corpus.text_bytes / 2**20:.1f} MiB in {corpus.path}")
    source, tokenizer = str(corpus.path), str(folder / "tokenizer")
    _command(
        "Train a tokenizer",
        *("data", "train-tokenizer", "--input", source, "--output", tokenizer),
        *("--vocab-size", "2048"),
    )
    _command(
        "Tokenize into Megatron's .bin/.idx",
        *("data", "preprocess", "--input", source, "--output-prefix", str(folder / "tokens")),
        *("--tokenizer", tokenizer, "--append-eod", "--workers", "2"),
    )
    vocab = len(json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"])
    raw = quickstart_config(folder, vocab, steps)
    config_file = folder / CONFIG
    config_file.write_text(yaml.safe_dump(raw, sort_keys=False))
    half = steps // 2
    _command(
        f"Train to step {half} and stop",
        *("train", "--config", str(config_file), f"train.exit_interval={half}"),
    )
    _command("Resume and finish", "train", "--config", str(config_file))
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    text = _command("Generate", "generate", "--config", str(config_file), *prompts, capture=True)
    print("\n" + text)
    samples = text.split(f"\n{SEPARATOR}\n")

    entropy, tokens = unigram_entropy(config_file)
    evaluations = [
        line
        for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        if "eval_loss" in line
    ]
    loss = evaluations[-1]["eval_loss"]
    notes = {
        "title": "Quickstart",
        "reference_lines": [{"label": "unigram entropy", "value": entropy}],
        "texts": [
            {"heading": f"Generated from {prompt!r}", "text": sample}
            for prompt, sample in zip(PROMPTS, samples, strict=True)
        ],
    }
    (folder / "run" / "report.json").write_text(json.dumps(notes))
    page = write_report(folder / "run")
    print(
        f"\n== Result\n"
        f"evaluation loss        {loss:.3f} nats per token ({math.exp(loss):.1f} ppl), "
        f"{evaluations[-1]['eval_tokens']} held-out tokens\n"
        f"their unigram entropy  {entropy:.3f} nats ({tokens} tokens)\n"
        f"below it by            {entropy - loss:.3f} nats\n"
        f"report                 {page}\n"
        f"everything is in       {folder} ({time.monotonic() - began:.0f} s)"
    )
    return entropy - loss


def main(argv: list[str] | None = None) -> int:
    """Parse and run; status 1 when the model learned less than it should."""
    parser = argparse.ArgumentParser(
        prog="jaxtron quickstart",
        description="Train, evaluate, resume and sample a small model on local text.",
        epilog="example: python -m jaxtron.quickstart --text ~/notes --out runs/notes",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        help="folders of text files or JSON Lines files; default: Python's standard library",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder to fill")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (at least 8)")
    parser.add_argument("--megabytes", type=float, default=8, help="text to use at most [MiB]")
    args = parser.parse_args(argv)
    if args.steps < 8:
        raise ConfigError(f"--steps {args.steps}: at least 8, so that there is a middle to stop at")
    gain = quickstart(args.out, args.text, steps=args.steps, megabytes=args.megabytes)
    if gain < ENOUGH:
        print(
            f"the model learned too little: {gain:.3f} nats below the unigram entropy, where "
            f"{ENOUGH:g} or more are expected; give more --steps or more text",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
