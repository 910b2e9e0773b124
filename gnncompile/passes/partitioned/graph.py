"""Tracks which dimensions of a captured graph are rows that parts share between them, and counts rows of all parts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from gnncompile.exc import PartitionError
from gnncompile.passes.analysis import is_tensor, own, value
from gnncompile.passes.context import Context, PaddedInputs
from gnncompile.passes.log import user_line
from gnncompile.passes.padded.graph import PaddedGraph, expression
from gnncompile.passes.partitioned.parts import REMEDY, Parts


class PartitionedGraph(PaddedGraph):
    """The rows of a graph over one part. Each symbol of a first dimension is a row type of its own.

    Padded mini-batches ask the same questions of each operation: does it work row by row, or does it mix rows?
    """

    def __init__(self, ctx: Context, parts: Parts) -> None:
        symbols: dict[Any, int] = {}
        of_plans = {node for found in parts.sources.values() for node in (found.send, found.halo)}
        for node in ctx.graph.nodes:
            if node.op == "placeholder" and is_tensor(node) and value(node).dim() and node not in of_plans:
                size = expression(value(node).shape[0])
                if size.is_Symbol:
                    symbols.setdefault(size, len(symbols))
        super().__init__(ctx, PaddedInputs(cast(Any, None), sizes=symbols))
        self.parts = parts

    def refuse(self, why: str) -> Any:
        """Returns the error to raise, with the line of the current node."""
        line = user_line(self.at)
        place = "" if line == "?" else f"{line}: "
        name = getattr(self.at.target, "_schema", None)
        operation = self.at.op if name is None else name.name.split("::")[1]
        return PartitionError(
            f"{place}the operation {operation} {why}. Over the parts of a graph this has no form yet. {REMEDY}"
        )

    def number(self, kind: int) -> fx.Node:
        """Returns the number of rows of a row type in all parts, int64 without dimensions."""
        if kind not in self.numbers:
            node = next(
                n
                for n in self.ctx.graph.nodes
                if is_tensor(n)
                for s in value(n).shape[:1]
                if self.kinds.get(expression(s)) == (kind,)
            )
            like = next(iter(self.parts.sources.values())).send
            with self.ctx.graph.inserting_after(self.last_input if node.op == "placeholder" else node):
                rows = self.ctx.call(torch.ops.aten.sym_size.int, node, 0)
            with self.ctx.graph.inserting_after(rows):
                self.numbers[kind] = self.ctx.call(own.count_rows.default, rows, like, self.parts.group, [])
        return self.numbers[kind]

    def select(self, size: Any) -> None:
        """Adds a row type for rows that a mask selects."""
        symbol = expression(size)
        if symbol not in self.kinds:
            kind = max([*self.known.sizes.values(), -1]) + 1
            self.known.sizes[symbol], self.kinds[symbol] = kind, (kind,)

    def all_reduced(self, node: fx.Node, kind: str = "sum") -> fx.Node:
        """Returns the sum, or the maximum, of a value over all parts."""
        return self.ctx.call(own.all_reduce.default, node, kind, self.parts.group, [], like=self.at)
