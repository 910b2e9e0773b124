"""A table of the reductions over the edges of a row, with one entry per reduction.

To add a reduction, add an entry here. The reference interpreter, both generators and the verifier read the table. A row
without edges always gives 0, whatever start value a reduction has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Reduction:
    """How the values on the edges of a row are combined into one value.

    The operation is associative and commutative. Hubs are reduced in pieces, and the results of the pieces are reduced
    again.

    Attributes:
        name: The name; a region calls the operation ``reduce_<name>``.
        torch: The name of the same reduction in :meth:`torch.Tensor.scatter_reduce`.
        triton_start: The start value of an accumulator, as Triton text. Combining it with a value gives that value.
        triton_function: The name of the Triton function that combines two values; empty for a sum.
        triton: The Triton expression that combines ``{0}`` and ``{1}``; empty for a sum (``tl.sum``).
        cpp_start: The start value of an accumulator, as C++ text of type ``T``.
        cpp: The C++ expression that combines the accumulator ``{0}`` and a value ``{1}``; empty for a sum.
        gradient: Where the gradient of a row goes. ``"edges"``: to each of its edges. ``"ties"``: in equal shares to
            the edges that reach the result. None if the reduction has no gradient.
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
        """Whether the reduction is a sum, which generators write with ``+``."""
        return self.name == "sum"

    @property
    def op(self) -> str:
        """The name of the operation in a region."""
        return f"reduce_{self.name}"


PROPAGATE = "propagate_nan=tl.PropagateNan.ALL"
"""An argument of Triton's maximum and minimum. With it, the result of a NaN and a number is NaN, as in torch."""

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
"""All reductions, by the name of the operation in a region."""


def gradient_of(op: str) -> Literal["edges", "ties"] | None:
    """Returns where the gradient of an operation's row goes; None if `op` is no reduction, or has no gradient."""
    return REDUCTIONS[op].gradient if op in REDUCTIONS else None
