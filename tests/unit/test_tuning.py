"""The table of tuned numbers: each has a use and a text, and measurements belong to fields that exist."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from gnncompile import tuning

ROOT = Path(__file__).resolve().parents[2]
TABLES = [tuning.TileTable, tuning.LoopTable]


def _told(table: type) -> dict[str, str]:
    """The text below each field."""
    tree = ast.parse(Path(inspect.getfile(table)).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == table.__name__)
    found = {}
    for one, text in pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(one.target)] = " ".join(str(text.value.value).split())
    return found


@pytest.mark.parametrize("table", TABLES)
def test_each_number_is_told_and_used(table: type):
    names = [one.name for one in fields(table)]
    assert list(_told(table)) == names
    sources = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (ROOT / "gnncompile").rglob("*.py")
        if "from gnncompile import" in (text := file.read_text(encoding="utf-8")) and "tuning" in text
    )
    used = set(re.findall(r"\b(?:tuning\.TILES|tuning\.LOOPS|tiles|loops|table)\.(\w+)", sources))
    assert set(names) <= used


def test_measurements_belong_to_fields():
    files = sorted((ROOT / "benchmarks" / "results").glob("*/tuning.txt"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    headings = re.findall(r"^([a-z_, ]+)\n-+$", text, re.MULTILINE)
    measured = [name for heading in headings for name in heading.split(", ")]
    assert len(measured) == len(set(measured))
    told = _told(tuning.TileTable)
    assert set(measured) == {name for name in told if told[name].endswith("Measured.")}


def test_choice_by_size():
    choices = ((0, 8), (16, 4), (64, 2))
    assert [tuning.choice(choices, size) for size in (0, 15, 16, 63, 64, 1000)] == [8, 8, 4, 4, 2, 2]
