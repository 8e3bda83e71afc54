"""Every test that docs/cases.md names exists, and every case of training is in it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = re.findall(r"^\| (O\d\d) .*$", (ROOT / "docs/cases.md").read_text(), re.M)
CASES = [
    *(f"O{number:02d}" for number in range(1, 17)),
    *(f"O{number}" for number in range(19, 24)),
]


def test_every_case_has_a_row() -> None:
    assert ROWS == CASES


@pytest.mark.parametrize("case", CASES)
def test_named_tests_exist(case: str) -> None:
    text = (ROOT / "docs/cases.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| {case} "))
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named
    for file, name in named:
        functions = ast.walk(ast.parse((ROOT / file).read_text()))
        assert any(isinstance(f, ast.FunctionDef) and f.name == name for f in functions), name
