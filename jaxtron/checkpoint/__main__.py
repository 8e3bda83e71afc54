"""``python -m jaxtron.checkpoint``: list, show, verify and prune checkpoints."""

import argparse
import json
from pathlib import Path

from jaxtron.checkpoint import steps as step_folder
from jaxtron.checkpoint.meta import read_meta
from jaxtron.cli import run
from jaxtron.errors import CheckpointError


def main(argv: list[str] | None = None) -> int:
    """Run the verb; returns the exit status (1: ``verify`` found damage)."""
    parser = argparse.ArgumentParser(
        prog="jaxtron checkpoint",
        description="List, show, verify and prune a run's checkpoints.",
        epilog="example: python -m jaxtron.checkpoint list runs/tiny/checkpoints",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    _list = _add(verbs, "list", "the steps of a folder", "list runs/tiny/checkpoints")
    _list.set_defaults(action=_run_list)
    show = _add(verbs, "show", "what one step holds", "show runs/tiny/checkpoints --step 100")
    show.add_argument("--step", type=int, help="step to show (default: the newest)")
    show.add_argument("--json", action="store_true", help="print the whole record as JSON")
    show.set_defaults(action=_run_show)
    verify = _add(
        verbs,
        "verify",
        "check every file and array; exit status 1 if any is damaged",
        "verify runs/tiny/checkpoints",
    )
    verify.add_argument("--step", type=int, help="step to check (default: every step)")
    verify.set_defaults(action=_run_verify)
    prune = _add(verbs, "prune", "delete steps", "prune runs/tiny/checkpoints --keep 2")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=int, metavar="N", help="delete all but the newest N steps")
    which.add_argument("--after", type=int, metavar="STEP", help="delete steps above STEP")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    prune.set_defaults(action=_run_prune)
    arguments = parser.parse_args(argv)
    status: int = arguments.action(arguments)
    return status


def _add(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, help: str, example: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example: python -m jaxtron.checkpoint {example}",
    )
    verb.add_argument("dir", type=Path, metavar="DIR", help="checkpoint folder, or one step's")
    return verb


def _run_list(arguments: argparse.Namespace) -> int:
    directory, _ = _folder(arguments)
    steps = step_folder.scan(directory)
    print(f"{'step':>10}  {'size':>10}  {'model digest':<16}  consumed samples")
    for step in steps.complete:
        step_dir = directory / str(step)
        meta = read_meta(step_dir)
        samples = meta.run.get("consumed_samples", "-")
        print(f"{step:>10}  {_size(step_dir):>10}  {meta.model_digest}  {samples}")
    for step, reason in steps.incomplete.items():
        print(f"{step:>10}  incomplete: {reason}")
    return 0


def _run_show(arguments: argparse.Namespace) -> int:
    directory, step = _folder(arguments)
    step_dir = directory / str(step_folder.choose(directory, step))
    meta = read_meta(step_dir)
    if arguments.json:
        print(json.dumps(meta.to_json(), indent=2))
        return 0
    print(f"step            {meta.step}")
    print(f"format version  {meta.format_version}")
    print(f"written by      {', '.join(f'{k} {v}' for k, v in meta.versions.items())}")
    print(f"size            {_size(step_dir)}")
    print(f"parameters      {meta.parameters:,}")
    print(f"model digest    {meta.model_digest}")
    for key, value in meta.run.items():
        print(f"{key}: {json.dumps(value, indent=2)}")
    print(f"arrays ({len(meta.arrays)}):")
    for name, record in meta.arrays.items():
        print(f"  {record.digest}  {record.dtype}{list(record.shape)}  {name}")
    return 0


def _run_verify(arguments: argparse.Namespace) -> int:
    import jax

    # Arrays are digested on the CPU: the accelerators may be busy with training.
    jax.config.update("jax_platforms", "cpu")
    from jaxtron.checkpoint.verify import verify_step

    directory, step = _folder(arguments)
    steps = step_folder.scan(directory)
    numbered = sorted(
        {*steps.complete, *(s for s in steps.incomplete if (directory / str(s)).exists())}
    )
    if step is not None and step not in numbered:
        step_folder.choose(directory, step)
    if not numbered:
        raise CheckpointError(f"{directory} holds no checkpoint")
    damaged = False
    for number in numbered if step is None else [step]:
        report = verify_step(directory / str(number))
        for problem in report.problems:
            print(f"step {number}: {problem}")
        verdict = f"DAMAGED ({len(report.problems)} problems)" if report.problems else "sound"
        print(f"step {number}: {verdict}: {report.files} files, {report.arrays} arrays checked")
        damaged |= bool(report.problems)
    return 1 if damaged else 0


def _run_prune(arguments: argparse.Namespace) -> int:
    directory, _ = _folder(arguments)
    complete = step_folder.scan(directory).complete
    if arguments.keep is not None:
        if arguments.keep < 1:
            raise CheckpointError(f"--keep is {arguments.keep}: expected at least 1")
        doomed = step_folder.superseded(complete, keep=arguments.keep, retain_interval=None)
    else:
        doomed = [step for step in complete if step > arguments.after]
    for step in doomed:
        if not arguments.dry_run:
            step_folder.delete_step(directory, step)
        print(f"{'would delete' if arguments.dry_run else 'deleted'} step {step}")
    if not doomed:
        print("nothing to delete")
    return 0


def _folder(arguments: argparse.Namespace) -> tuple[Path, int | None]:
    """The checkpoint folder, and the step if one is named by ``--step`` or by the path."""
    directory, step = step_folder.locate(arguments.dir.absolute())
    wanted: int | None = getattr(arguments, "step", None)
    return directory, step if wanted is None else wanted


def _size(step_dir: Path) -> str:
    size = float(sum(path.stat().st_size for path in step_dir.rglob("*") if path.is_file()))
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


if __name__ == "__main__":
    raise SystemExit(run(main))
