"""Helpers that write pieces of Triton code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import Node, Region

ELEMENTARY = "from gnncompile.codegen.triton.elementary import exp_or_zero, expm1, reciprocal, sigmoid, softplus, tanh"
"""The import of the functions that generated kernels call for float32 numbers."""


def exponential(compute: str, text: str) -> str:
    """Returns the exponential of a logit less a maximum, which is at most 1; a float32 result below 2**-126 is 0."""
    return f"{'exp_or_zero' if compute == 'tl.float32' else 'tl.exp'}({text})"


def masked(masks: list[str], other: str = "") -> str:
    """Returns the mask arguments of a load or a store, after a leading comma; ``""`` without masks."""
    if not masks:
        return ""
    return f", mask={' & '.join(masks)}{f', other={other}' if other else ''}"


def block_kernel(title: str, imported: str, decorator: str, signature: str, calls: Iterable[str]) -> str:
    """Returns a module with a kernel whose programs share work by blocks.

    Args:
        title: A comment.
        imported: Where the called function comes from, as an import.
        decorator: The decorator of the kernel.
        signature: The name of the kernel with its parameters.
        calls: Calls that take the number `block`, and return the number among the blocks of later calls.
    """
    head = [f"# {title}", "", "import triton", "import triton.language as tl", "", imported, "", ""]
    lines = [decorator, f"def {signature}:", "    block = tl.program_id(0)", *(f"    block = {call}" for call in calls)]
    return "\n".join([*head, *lines]) + "\n"


def literal(value: float) -> str:
    """Returns a number as Triton code."""
    if math.isfinite(value):
        return repr(value) if math.copysign(1.0, value) > 0 else f"({value!r})"
    return f'float("{value!r}")'


def constant(node: Node, compute: str, shape: str, bare: bool) -> str:
    """Returns a constant as Triton code: a block of this shape and type, or a literal if `bare`."""
    if node.negative_zero:  # Triton's literals of 0 are positive
        return f"(tl.full({shape}, 0.0, {compute}) * -1.0)"
    number = literal(node.number)
    return number if bare else f"tl.full({shape}, {number}, {compute})"


def without_parentheses(text: str) -> str:
    """Removes a pair of parentheses that encloses the whole expression, if there is one."""
    if not text.startswith("("):
        return text
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:-1] if at == len(text) - 1 else text
    return text


def pointwise_arguments(region: Region, node: Node, operand: Callable[[int, bool], str]) -> list[str]:
    """Returns the texts of the arguments of a pointwise operation.

    Args:
        region: The region.
        node: The operation.
        operand: Returns the text of a value; its second argument says whether a constant may be a bare literal.
    """
    nodes = [region.nodes[a] for a in node.args]
    typed = nodes[1:] if node.op == "where" else nodes
    # A literal takes its type from the other operand; without one, Triton would compute in float32.
    bare = POINTWISE[node.op].bare and any(n.op != "const" for n in typed)
    args = [operand(a, bare) for a in node.args]
    if node.op in ("and", "or"):
        args = [a if n.boolean else f"({a} != 0)" for a, n in zip(args, nodes, strict=True)]
    return args


def _is_short_division(region: Region, node: Node) -> bool:
    """Whether a quotient is written as a product: of many float32 numbers by one square root, as norms have it.

    A square root is 0, infinite, NaN, or between 1e-23 and 2e19. A product with its inverse has the same special
    values, and loses nothing. The inverse of another number may be infinite or subnormal.
    """
    divisor = region.nodes[node.args[1]]
    wide = math.prod(node.shape) > math.prod(divisor.shape)
    return region.compute == "float32" and divisor.op == "sqrt" and wide


def pointwise_text(region: Region, node: Node, args: list[str]) -> str:
    """Returns the text of a pointwise operation, given the texts of its arguments."""
    operation = POINTWISE[node.op]
    short = operation.triton_float32 if region.compute == "float32" else ""
    if node.op == "div" and _is_short_division(region, node):
        return f"{args[0]} * (1.0 / {args[1]})"
    text = (short or operation.triton).format(*args)
    return without_parentheses(re.sub(r"\bT\b", f"tl.{region.compute}", text))
