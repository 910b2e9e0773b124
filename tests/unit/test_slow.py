"""Which variants of tests are left to `make test-all`."""

from __future__ import annotations

import pytest

from tests import slow

LOG = """
3.00s call     tests/unit/test_a.py::test_one[x]
4.00s call     tests/unit/test_a.py::test_one[y z]
2.50s setup    tests/unit/test_a.py::test_one[w]
0.20s call     tests/unit/test_a.py::test_one[w]
90.0s call     tests/unit/test_a.py::test_two
9.00s call     tests/unit/test_b.py::test_one[x]
12.0s call     tests/unit/test_b.py::test_one[y]
passed in 100s
"""


def test_every_function_keeps_its_quickest_variants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow, "MOST_OF_A_FUNCTION", 6.0)
    times = slow.seconds(LOG)
    assert times["tests/unit/test_a.py::test_one[w]"] == 2.7 and len(times) == 6
    assert slow.chosen(times) == ["tests/unit/test_a.py::test_one[y z]", "tests/unit/test_b.py::test_one[y]"]


def test_the_list_names_tests():
    lines = slow.FILE.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines)) and all("::" in line and "[" in line for line in lines)
    assert all((slow.FILE.parents[1] / line.partition("::")[0]).exists() for line in lines)
