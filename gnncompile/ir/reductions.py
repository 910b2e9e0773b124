"""The reductions over the edges of a row: one row of a table for each.

A reduction is added here, and nowhere else in the generators: the reference interpreter, both generators and the
verifier read the table. A row without edges gives 0, whatever a reduction starts with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Reduction:
    """How the values of the edges of a row become one value.

    The operation is associative and commutative: hubs are reduced in pieces, and the results of pieces once more.

    Attributes:
        name: The operation of a region is called ``reduce_<name>``.
        torch: What :meth:`torch.Tensor.scatter_reduce` calls the same reduction.
        triton_start: What an accumulator starts with, as Triton text: combined with any value, it gives that value.
        triton_function: The name of the Triton function that combines two values; empty for a sum.
        triton: The Triton expression that combines ``{0}`` and ``{1}``; empty for a sum (``tl.sum``).
        cpp_start: What an accumulator starts with in C++, of the type ``T``.
        cpp: The C++ expression of the accumulator ``{0}`` and a value ``{1}``; empty for a sum.
        gradient: Where the gradient of a row goes: to all of its edges, or shared out among the edges that reach the
            result (``ties``). None where a reduction has no gradient.
    """

    name: str
    torch: str
    triton_start: str
    triton_function: str
    triton: str
    cpp_start: str
    cpp: str
    gradient: Literal["edges", "ties"] | None

    @property
    def adds(self) -> bool:
        """Whether it is a sum, which generators add up without a function."""
        return self.name == "sum"

    @property
    def op(self) -> str:
        """The name of the operation in a region."""
        return f"reduce_{self.name}"


PROPAGATE = "propagate_nan=tl.PropagateNan.ALL"
"""An argument of Triton's maxima and minima: of a NaN and a number they are NaN, as torch's are."""

SUM = Reduction("sum", "sum", "0.0", "", "", "T(0)", "", "edges")
MAX = Reduction(
    "max",
    "amax",
    'float("-inf")',
    "maximum",
    f"tl.maximum({{0}}, {{1}}, {PROPAGATE})",
    "T(-__builtin_inf())",
    "op_max({0}, {1})",
    "ties",
)
MIN = Reduction(
    "min",
    "amin",
    'float("inf")',
    "minimum",
    f"tl.minimum({{0}}, {{1}}, {PROPAGATE})",
    "T(__builtin_inf())",
    "op_min({0}, {1})",
    "ties",
)

REDUCTIONS: dict[str, Reduction] = {one.op: one for one in (SUM, MAX, MIN)}
"""By the name of the operation."""
