"""``python -m jaxtron.generate --config FILE --prompt TEXT``: continue a text."""

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

import jax
import numpy as np

from jaxtron.checkpoint.checkpointer import Checkpointer
from jaxtron.cli import at_least, parse_with_overrides, run
from jaxtron.config.config import Config
from jaxtron.config.load import load_config
from jaxtron.config.validate import validate_for_training
from jaxtron.data.tokenizers import Tokenizer, load_tokenizer
from jaxtron.errors import CheckpointError, ConfigError
from jaxtron.launch.initialize import launch
from jaxtron.program import Program
from jaxtron.resume import check_architecture

EXAMPLE = """example:
  python -m jaxtron.generate --config run/config.yaml --prompt "def main(" --max-tokens 60
"""

SEPARATOR = "-" * 40


def generate(
    program: Program,
    params: object,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """Continuation of ``prompt`` by sampling token after token.

    The whole row is computed again for each token (no key/value cache): meant for looking at a
    model, not for serving.

    Args:
        program: the compiled program of the model.
        params: its parameters.
        tokenizer: of the training data.
        prompt: text to continue; its last ``seq_length - 1`` tokens are seen.
        max_tokens: tokens to add at most; an end of document stops earlier.
        temperature: 0 takes the likeliest token.
        top_k: sample among this many likeliest tokens.
        seed: of the draws.

    Raises:
        ConfigError: the prompt has no token, or one that the model does not have.
    """
    ids = tokenizer.encode(prompt)
    vocab = program.config.model.vocab_size
    if not ids:
        raise ConfigError("--prompt is empty: give at least one token to continue")
    if max(ids) >= vocab:
        raise ConfigError(
            f"--prompt has token {max(ids)}, the model has {vocab}: use the tokenizer that the "
            "model was trained with"
        )
    length = program.config.data.seq_length
    rng = np.random.default_rng(seed)
    added: list[int] = []
    while len(added) < max_tokens:
        window = (ids + added)[-length:]
        row = np.zeros((1, length), np.int32)
        row[0, : len(window)] = window
        last = np.array([len(window) - 1], np.int32)
        logits = np.asarray(program.next_token_logits(params, row, last))[0].astype(np.float64)
        if temperature == 0:
            token = int(np.argmax(logits))
        else:
            best = np.argsort(logits)[-top_k:]
            weights = np.exp((logits[best] - logits[best].max()) / temperature)
            token = int(rng.choice(best, p=weights / weights.sum()))
        if token == tokenizer.eod:
            break
        added.append(token)
    return tokenizer.decode(added)


def fitting_layout(config: Config, num_devices: int) -> Config:
    """The configuration with a layout that fits ``num_devices`` devices.

    That of the run where it fits. Otherwise ``parallel.tensor`` is the largest size that the model
    and the devices allow, because it splits the weights while they are used, and ``fsdp`` the rest.

    Raises:
        ConfigError: what is wrong with the configuration, when no layout mends it.
    """
    try:
        validate_for_training(config, num_devices)
        return config
    except ConfigError as error:
        refusal = error
    divisors = [t for t in range(1, num_devices + 1) if num_devices % t == 0]
    for tensor in reversed(divisors):
        rest = num_devices // tensor
        parallel = dataclasses.replace(
            config.parallel,
            pipeline=1,
            data=1,
            fsdp=rest,
            expert=1,
            context=1,
            tensor=tensor,
            sequence_parallel=None,
            virtual_pipeline=1,
            pipeline_layout=None,
            rules={},
        )
        train = dataclasses.replace(
            config.train,
            global_batch_size=rest,
            rampup_batch_size=None,
            micro_batch_size=1,
            num_microbatches=None,
        )
        candidate = dataclasses.replace(config, parallel=parallel, train=train)
        try:
            validate_for_training(candidate, num_devices)
        except ConfigError:
            continue
        print(
            f"the layout of the run does not fit {num_devices} device(s); using "
            f"parallel.tensor={tensor} parallel.fsdp={rest}",
            file=sys.stderr,
        )
        return candidate
    raise refusal


def main(argv: list[str] | None = None) -> int:
    """Load the newest checkpoint of a run and print a continuation."""
    parser = argparse.ArgumentParser(
        prog="jaxtron generate",
        description="Continue a text with a trained model.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="config.yaml of the run")
    parser.add_argument(
        "--checkpoint", help="folder of checkpoints or of one step; default: the run's"
    )
    parser.add_argument(
        "--prompt", required=True, action="append", help="text to continue; may be given again"
    )
    parser.add_argument("--max-tokens", type=at_least(0), default=100)
    parser.add_argument(
        "--temperature", type=at_least(0, float), default=0.8, help="0: the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=at_least(1), default=40, help="sample among this many likeliest tokens"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values over those of the file"
    )
    args = parse_with_overrides(parser, argv)
    # force: libraries that were imported have installed a handler of their own
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr, force=True)
    config = load_config(args.config, args.overrides)
    launch(config.runtime)
    if config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is null: generation needs the run's tokenizer")
    folder = args.checkpoint or config.checkpoint.dir
    if folder is None:
        raise CheckpointError("checkpoint.dir is null: give --checkpoint FOLDER")
    tokenizer = load_tokenizer(config.data.tokenizer)
    if not any(override.startswith("parallel.") for override in args.overrides):
        config = fitting_layout(config, jax.device_count())
    program = Program(config)
    checkpointer = Checkpointer(
        dataclasses.replace(config.checkpoint, dir=None, interval=0, load=str(Path(folder)))
    )
    start = checkpointer.start_point()
    if start is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint")
    meta = checkpointer.read_meta(start.step, directory=start.directory)
    check_architecture(config, meta, str(start.directory))
    abstract = {"params": program.abstract_state()["params"]}
    state, _ = checkpointer.restore(start.step, abstract, directory=start.directory)
    state = program.from_logical(state)
    for prompt in args.prompt:
        text = generate(
            program,
            state["params"],
            tokenizer,
            prompt,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
        print(prompt + text)
        if prompt != args.prompt[-1]:
            print(SEPARATOR)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
