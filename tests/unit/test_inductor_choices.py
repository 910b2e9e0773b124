"""Which reductions Inductor fuses in our compiles, and which get our tile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V

from gnncompile import tuning
from gnncompile._compat import inductor_choices
from gnncompile._compat.inductor_choices import set_choices

ROWS = sympy.Symbol("s0", integer=True, positive=True)


def _kwargs(**changed: Any) -> dict[str, Any]:
    """What Inductor would give to a kernel that sums 64 columns of a symbolic number of rows, in 1,000 parts."""
    given: dict[str, Any] = {"numel": 64_000, "hint": ReductionHint.OUTER, "axes": ("x", "r0_"), "reduces": True}
    given |= {"persistent": False, "cooperative": None, "op": "sum", **changed}
    features = SimpleNamespace(
        is_reduction=lambda: given["reduces"],
        get_reduction_hint=lambda: given["hint"],
        contains_op=lambda name: name == given["op"],
        numel=sympy.sympify(given["numel"]),
        reduction_numel=ROWS,
    )
    kwargs = {"features": features, "override_persistent_reduction": given["persistent"]}
    if given["cooperative"] is not None:
        kwargs["override_cooperative_reduction"] = given["cooperative"]
    with set_choices():
        made: dict[str, Any] = V.choices.triton_kernel_kwargs(
            object, features, [dict.fromkeys(given["axes"], ROWS)], kwargs
        )
    return made


def test_tile_of_sums_by_column():
    assert _kwargs()["fixed_config"].config == tuning.COLUMN_SUMS


@pytest.mark.parametrize(
    "changed",
    [
        {"numel": tuning.LEAST_COLUMN_SUMS - 1},
        {"numel": ROWS},
        {"hint": ReductionHint.INNER},
        {"hint": ReductionHint.DEFAULT},
        {"axes": ("y", "x", "r0_")},
        {"axes": ("x",)},
        {"reduces": False},
        {"persistent": True},
        {"persistent": None},
        {"cooperative": True},
        {"op": "scan"},
    ],
)
def test_others_keep_theirs(changed: dict[str, Any]):
    assert "fixed_config" not in _kwargs(**changed)


@pytest.mark.parametrize("setting", ["cooperative_reductions", "force_cooperative_reductions"])
def test_programs_that_sum_together_keep_their_tile(setting: str):
    with torch._inductor.config.patch({f"triton.{setting}": True}):
        assert "fixed_config" not in _kwargs()


class _Theirs:
    """Inductor's choices, where two nodes share much of what they read."""

    @staticmethod
    def can_fuse_horizontal(*_: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("mixed", "elements", "fused"), [(True, 640_000, False), (True, 12_800_000, True), (False, 640_000, True)]
)
def test_rows_and_columns_of_small_matrices_are_summed_apart(
    mixed: bool, elements: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums along one axis may fuse with each other. tests/e2e/test_symbolic_sizes.py counts kernels on a GPU."""
    monkeypatch.setattr(MixOrderReduction, "can_fuse", lambda *_: mixed)
    monkeypatch.setattr(MixOrderReduction, "get_numel", lambda *_: elements)
    assert inductor_choices._choices(_Theirs).can_fuse_horizontal(None, None, None, 100) is fused
