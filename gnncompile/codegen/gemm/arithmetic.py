"""Writes the Triton functions that compute what follows a product, or one of its factors. Imports Triton.

The arithmetic is a region without edges, in which each row of a matrix is a row. Values are ``[rows, columns]``,
``[rows, 1]``, ``[columns]`` or a single number, and are computed in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.text import ELEMENTARY, constant, pointwise_arguments, pointwise_text
from gnncompile.ir.region import BOOL, Node, Region, Space, parse


@lru_cache(maxsize=1024)
def epilogue(spec: str) -> Any:
    """Returns the function that computes and writes the outputs of a region, from a tile of a product.

    Its parameters are the tile, three pointers to what else the region reads, two pointers to its outputs, the rows and
    columns of the tile, and the numbers of rows and columns of the outputs. The first tensor of the region is the
    product; of pointers that the region does not need, any are passed.
    """
    region = parse(spec)
    lines = _statements(region, ["", "first_ptr", "second_ptr", "third_ptr"])
    for out, pointer in zip(region.outputs, ("out_ptr", "other_out_ptr"), strict=False):
        value = _operand(region, out.node)
        lines.append(f"tl.store({pointer} + at, ({value}).to(tl.{out.dtype}), mask=mask)")
    parameters = "product, first_ptr, second_ptr, third_ptr, out_ptr, other_out_ptr"
    return load_module(_module("epilogue", parameters, lines)).epilogue


@lru_cache(maxsize=1024)
def factor(spec: str) -> Any:
    """Returns the function that computes a tile of a region's output, which is zero outside the matrix.

    Its parameters are two pointers to what the region reads, the rows and columns of the tile, and the numbers of rows
    and columns of the output. The second pointer may be any if the region reads one tensor.
    """
    region = parse(spec)
    (out,) = region.outputs
    lines = _statements(region, ["first_ptr", "second_ptr"])
    lines.append(f"return tl.where(mask, {_operand(region, out.node)}, 0.0).to(tl.{out.dtype})")
    return load_module(_module("factor", "first_ptr, second_ptr", lines)).factor


def _module(name: str, parameters: str, lines: list[str]) -> str:
    head = [
        "import triton",
        "import triton.language as tl",
        "",
        ELEMENTARY,
        "",
        "",
        "@triton.jit",
        f"def {name}({parameters}, row, column, rows, columns):",
        "    at = row[:, None].to(tl.int64) * columns + column[None, :]",
        "    mask = (row[:, None] < rows) & (column[None, :] < columns)",
    ]
    return "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n"


def _statements(region: Region, pointers: list[str]) -> list[str]:
    """Returns the statements that compute all values of a region, given the pointers to its tensors.

    A tensor without a pointer is the tile of the product. A product of 16 bits is rounded as it would be in memory: a
    step (``floor(x)``, ``x > 0.5``) must fall where a backward finds it that reads the stored product.
    """
    lines = []
    for at, node in enumerate(region.nodes):
        if node.op == "input":
            pointer = pointers[int(node.value or 0)]
            rounded = f"product.to(tl.{node.dtype}).to(tl.float32)"
            lines.append(f"v{at} = {_load(node, pointer) if pointer else rounded}")
        elif node.op != "const":
            given = pointwise_arguments(region, node, lambda i, bare: _operand(region, i, bare))
            lines.append(f"v{at} = {pointwise_text(region, node, given)}")
    return lines


def _operand(region: Region, at: int, bare: bool = False) -> str:
    node = region.nodes[at]
    return constant(node, "tl.float32", "()", bare) if node.op == "const" else f"v{at}"


def _load(node: Node, pointer: str) -> str:
    """Returns the text of a tensor's elements for a tile: of all, of each row, of each column, or one for all."""
    wide = node.shape[1] > 1
    if node.space is Space.PARAMETER:
        place = "column[None, :], mask=column[None, :] < columns" if wide else "tl.zeros((1, 1), tl.int32)"
    else:
        place = "at, mask=mask" if wide else "row[:, None], mask=row[:, None] < rows"
    other = ", other=0" if "mask" in place else ""
    loaded = f"tl.load({pointer} + {place}{other})"
    return f"{loaded} != 0" if node.dtype == BOOL else f"{loaded}.to(tl.float32)"
