"""The choices that Inductor takes from an object, in gnncompile's compiles."""

from __future__ import annotations

from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.scheduler import MixOrderReduction
from torch._inductor.virtualized import V

from gnncompile import tuning

_LARGE = 5 * 2**20
"""The least number of elements of a matrix whose rows and columns are summed in one kernel.

A smaller matrix stays in the cache.
"""

_SUMMED = {"x", "r0_"}
"""Inductor's names of the axes of a kernel that sums along one axis."""


def set_choices() -> Any:
    """Returns a context in which Inductor takes our choices, where these differ from its own."""
    return V.set_choices_handler(_choices(V.choices.__class__))


def _choices(theirs: Any) -> Any:
    """Returns choices for large matrices with symbolic numbers of rows.

    - Rows and columns are summed in one kernel for large matrices only. Torch asks for the size by a guard, and assumes
      that the guard holds for symbolic sizes. So the columns of all matrices would be summed in two steps, the second
      by a separate operation.
    - A sum down the columns takes many rows per step. Inductor takes few if their number is symbolic, and one row if
      the sum reads three tensors or more.
    """

    class Choices(theirs):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, one: Any, other: Any, shared: int) -> bool:
            if MixOrderReduction.can_fuse(one, other) and MixOrderReduction.get_numel(one) < _LARGE:
                return False
            return bool(theirs.can_fuse_horizontal(scheduler, one, other, shared))

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
            found = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            if not _sums_many_rows(features, groups, found):
                return found
            return {**found, "fixed_config": FixedTritonConfig(dict(tuning.COLUMN_SUMS))}

    return Choices()


def _sums_many_rows(features: Any, groups: Any, given: dict[str, Any]) -> bool:
    """Whether a kernel sums a symbolic number of rows by column, and writes enough sums to fill a GPU.

    Inductor sets ``override_persistent_reduction`` to False where the number of rows is symbolic.
    """
    if not features.is_reduction() or features.contains_op("scan") or set(groups[0]) != _SUMMED:
        return False
    if given.get("override_persistent_reduction") is not False or inductor_config.triton.cooperative_reductions:
        return False
    if given.get("override_cooperative_reduction") or inductor_config.triton.force_cooperative_reductions:
        return False
    columns = features.numel
    return (
        str(features.get_reduction_hint()) == "ReductionHint.OUTER"
        and bool(columns.is_Integer)
        and int(columns) >= tuning.LEAST_COLUMN_SUMS
    )
