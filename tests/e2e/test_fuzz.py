"""A bounded share of the fuzzer of whole programs, always the same; ``python -m tests.fuzz --count N`` tries more.

``GNNCOMPILE_TEST_EXAMPLES=20 pytest tests/e2e/test_fuzz.py`` tries 20 times as many.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given

from gnncompile.runtime import launch
from tests.fuzz.cases import cases
from tests.fuzz.check import Case, Finding, NotComparable, check
from tests.fuzz.graphs import Size
from tests.fuzz.program import Line, Program
from tests.fuzz.shrink import shrink
from tests.randomly import examples

USED_TWICE = Program(
    (
        Line("v0", "scatter(w * x[src], dst, 0, n, 'sum')"),
        Line("v1", "(x[dst] - w).relu()"),
        Line("v2", "torch.tanh(y)"),
    ),
    ("v0", "v1", "v2"),
)


def try_one(case: Case) -> None:
    try:
        check(case)
    except NotComparable:
        assume(False)


@examples(18)
@given(cases(most=10).filter(lambda case: case.engine != "inductor"))
def test_programs_are_eager(case: Case):
    try_one(case)


@examples(3)
@given(cases(most=6, engine="inductor", way="training", dtype="float64", kernels="reference"))
def test_programs_are_eager_in_code_of_inductor(case: Case):
    try_one(case)


def test_memory_that_nobody_wrote_is_found(monkeypatch: pytest.MonkeyPatch):
    def forgets(self: Any, tensors: Any, layout: Any, outputs: Any) -> None:
        pass

    monkeypatch.setattr(launch._Reference, "__call__", forgets)
    for engine in ("op by op", "passes", "inductor"):
        with pytest.raises(Finding, match="apart"):
            check(Case(USED_TWICE, engine=engine, kernels="reference"))


def test_a_wrong_number_is_found_and_shrunken(monkeypatch: pytest.MonkeyPatch):
    right = launch._Reference.__call__

    def wrong(self: Any, tensors: Any, layout: Any, outputs: Any) -> None:
        right(self, tensors, layout, outputs)
        outputs[0].mul_(1.001)

    case = Case(USED_TWICE, (Size(), Size(5, 0)), engine="op by op", kernels="reference", dtype="float32")
    check(case)
    monkeypatch.setattr(launch._Reference, "__call__", wrong)
    small = shrink(case)
    assert small == replace(case, program=Program(USED_TWICE.lines[:1], ("v0",)), sizes=(Size(),), dtype="float64")
    with pytest.raises(Finding, match="result 0"):
        check(small)
    with pytest.raises(Finding, match="result 0"):
        exec(str(small), {})  # what is printed tries it again


def test_what_a_compiled_model_raises_is_found(monkeypatch: pytest.MonkeyPatch):
    def raises(self: Any, tensors: Any, layout: Any, outputs: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(launch._Reference, "__call__", raises)
    with pytest.raises(Finding, match="RuntimeError: no kernel"):
        check(Case(USED_TWICE, engine="op by op", kernels="reference"))


def test_what_runs_uncompiled_is_found(monkeypatch: pytest.MonkeyPatch):
    def warns(self: Any, tensors: Any, layout: Any, outputs: Any) -> None:
        right(self, tensors, layout, outputs)
        warnings.warn("gnncompile: calls like this one run as Python", stacklevel=2)

    right = launch._Reference.__call__
    monkeypatch.setattr(launch._Reference, "__call__", warns)
    with pytest.raises(Finding, match="run as Python"):
        check(Case(USED_TWICE, engine="op by op", kernels="reference"))


def test_what_eager_raises_is_not_compared():
    net = Program((Line("v0", "F.batch_norm(x, None, None, training=True)"),), ("v0",))
    with pytest.raises(NotComparable, match="more than 1 value"):
        check(Case(net, (Size(1, 0),), engine="op by op"))


@pytest.mark.gpu
@examples(6)
@given(cases(most=8, device="cuda", engine="inductor", kernels="triton"))
def test_programs_are_eager_on_a_gpu(case: Case):
    try_one(case)
