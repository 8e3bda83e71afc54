"""The dispatcher: verbs, exit statuses, and errors as messages."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import jaxtron
from jaxtron import cli
from jaxtron.errors import DataError


def test_every_verb_is_a_module_with_a_main() -> None:
    for verb in cli.VERBS:
        assert callable(cli._verb_main(verb)), verb
        assert find_spec(f"jaxtron.{verb}") is not None


def test_a_verb_gets_the_arguments_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str] | None] = []

    def verb_main(argv: list[str] | None) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr(cli, "_verb_main", lambda verb: verb_main)
    assert cli.main(["train", "--config", "x.yaml", "a.b=1"]) == 7
    assert seen == [["--config", "x.yaml", "a.b=1"]]


def test_an_unknown_verb_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tarin"]) == 2
    assert "did you mean train" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "checkpoint" in capsys.readouterr().err


def test_a_users_error_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(argv: list[str] | None) -> int:
        raise DataError("data.bin is truncated")

    assert cli.run(fails) == 2
    assert capsys.readouterr().err == "error: data.bin is truncated\n"


def test_a_file_that_the_system_refuses_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()

    def reads_below_a_file(argv: list[str] | None) -> int:
        return len((file / "data.idx").read_bytes())

    assert cli.run(reads_below_a_file) == 2
    assert f"error: {file / 'data.idx'}: Not a directory" in capsys.readouterr().err


def test_an_error_of_the_system_without_a_file_keeps_its_traceback() -> None:
    def broken(argv: list[str] | None) -> int:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        cli.run(broken)


def test_an_interrupt_is_status_130() -> None:
    def interrupted(argv: list[str] | None) -> int:
        raise KeyboardInterrupt

    assert cli.run(interrupted) == 130


def test_a_bug_keeps_its_traceback() -> None:
    def broken(argv: list[str] | None) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.run(broken)


def test_help_and_version_need_no_jax() -> None:
    script = (
        "import sys; from jaxtron.cli import main; "
        "assert main(['--help']) == 0 and main(['--version']) == 0; assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert f"jaxtron {jaxtron.__version__}" in done.stdout
    for verb in cli.VERBS:
        assert f"\n  {verb} " in done.stdout


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "jaxtron", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"jaxtron {jaxtron.__version__}" in done.stdout


def test_a_closed_pipe_is_no_traceback() -> None:
    script = (
        "import sys\nfrom jaxtron.cli import run\n"
        "def main(argv):\n"
        "    for _ in range(100000): print('x' * 100)\n"
        "    return 0\n"
        "sys.exit(run(main))"
    )
    command = f'{sys.executable} -c "$SCRIPT" | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "SCRIPT": script},
    )
    assert done.stdout.splitlines()[-1] == "141"
    assert done.stderr == ""
