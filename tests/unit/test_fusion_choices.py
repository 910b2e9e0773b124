"""Which reductions Inductor fuses in our compiles."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor.scheduler import MixOrderReduction

from gnncompile._compat import inductor


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
    assert inductor._choices(_Theirs).can_fuse_horizontal(None, None, None, 100) is fused
