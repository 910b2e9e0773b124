"""Lists the exchanges of a captured graph: all processes must have captured the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from gnncompile.ops.exchange import parameters_of_all_parts
from gnncompile.passes.analysis import own, value
from gnncompile.passes.log import user_line


def exchanges_of(graphs: Iterable[fx.Graph]) -> list[tuple[str, str]]:
    """Returns each exchange of some graphs, in order: what it exchanges, and the user's line.

    Gradients of parameters come last, as in a step.
    """
    nodes = [node for graph in graphs for node in graph.nodes]
    nodes.sort(key=lambda node: node.target is parameters_of_all_parts)
    return [(text, user_line(node)) for node in nodes if (text := _text(node)) is not None]


def _text(node: fx.Node) -> str | None:
    args: Any = node.args
    if node.target is own.halo_exchange.default:
        rows = value(args[0])
        return f"an exchange of rows of {_shape(rows.shape[1:])} {rows.dtype}"
    if node.target is own.all_reduce.default:
        return f"a {args[1]} of {_shape(value(args[0]).shape)} {value(args[0]).dtype}"
    if node.target is own.count_rows.default:
        return "a number of rows"
    if node.target is parameters_of_all_parts:
        sizes = ", ".join(_shape(value(parameter).shape) for parameter in args[1:])
        return f"the gradients of parameters {sizes}"
    return None


def _shape(sizes: Iterable[Any]) -> str:
    return "x".join("?" if isinstance(size, torch.SymInt) else str(size) for size in sizes) or "one number"
