"""Layers over a sampled mini-batch leave out rows that no later operation reads.

Before: ``out = layer(layer(x, row, col), row, col)[:batch_size]``, each layer over all of the nodes that were sampled
After:  the last layer over the seeds and the edges to them, the one before over these edges' sources, and so on
Why it pays: a sampler finds ten times as many nodes in each hop as in the one before. From the nodes of the last hop,
        only the features are needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.layout.batch_metadata import RowLimit, current
from gnncompile.passes.analysis import arguments, aten, drop_unused, is_tensor, mutates, own, value
from gnncompile.passes.context import Context, HopPrefix, PaddedInputs
from gnncompile.passes.pointwise import POINTWISE


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if ctx.padded is not None and ctx.padded.hop_prefixes:
        wanted = _Wanted(ctx, ctx.padded)
        wanted.find()
        short = [node for node in ctx.graph.nodes if wanted.is_short(node)]
        if short:
            _Shorter(ctx, wanted).run(short)


class _Wanted:
    """Finds the hop prefix whose rows are read from each value with a row per node or edge.

    Attributes:
        levels: For each node of the graph, the index of the hop prefix whose rows are read from its value.
        read: For each node of the graph, the index of the hop prefix whose rows it reads from each input.
        everything: The level of a value whose rows are all read.
    """

    def __init__(self, ctx: Context, known: PaddedInputs) -> None:
        self.ctx, self.known = ctx, known
        self.row, self.col = known.hop_prefixes[0].of
        self.nodes, self.edges = known.values[self.col], known.kind(value(self.col).shape[0])
        self.everything = len(known.hop_prefixes) + 1
        self.levels: dict[fx.Node, int] = {}
        self.read: dict[fx.Node, dict[fx.Node, int]] = {}
        self._kinds: dict[fx.Node, int | None] = {}

    def find(self) -> None:
        """Fills `levels` and `read`, from the end of the graph to its beginning."""
        for node in reversed(self.ctx.graph.nodes):
            found = None if node.op != "call_function" else self._read(node)
            if found is None:
                self.levels[node] = self.everything
                found = dict.fromkeys(node.all_input_nodes, self.everything)
            for source, level in found.items():
                self.levels[source] = max(self.levels.get(source, 0), level)
            self.read[node] = found
            if isinstance(node.meta.get("val"), (tuple, list)):
                self._read_all_alike(node)

    def _read_all_alike(self, node: fx.Node) -> None:
        """Gives all results of an operation with several results the same level."""
        for part in node.users:
            self.levels[part], self.read[part] = self.levels[node], {node: self.levels[node]}

    def is_short(self, node: fx.Node) -> bool:
        """Whether only some of the rows that a node makes are read."""
        return node.op == "call_function" and self.rows(node) is not None and self.levels[node] < self.everything

    def rows(self, node: fx.Node) -> int | None:
        """Returns the row type of a tensor, or of all tensors of a tuple: nodes or edges. None for other values."""
        if node not in self._kinds:
            self._kinds[node] = self._find_rows(node)
        return self._kinds[node]

    def _find_rows(self, node: fx.Node) -> int | None:
        found = node.meta.get("val")
        parts = list(found) if isinstance(found, (tuple, list)) else [found]
        kinds = {self._rows_of(part) if isinstance(part, torch.Tensor) else None for part in parts}
        return kinds.pop() if len(kinds) == 1 else None

    def _rows_of(self, tensor: torch.Tensor) -> int | None:
        kinds = [self.known.kind(size) for size in tensor.shape]
        whole = [k for k in kinds if k in (self.nodes, self.edges)]
        return kinds[0] if len(whole) == 1 and whole[0] == kinds[0] else None

    def touches(self, node: Any) -> bool:
        """Whether a number, or a size of a tensor, depends on the number of all nodes or edges."""
        found = node.meta.get("val") if isinstance(node, fx.Node) else node
        parts = found if isinstance(found, (tuple, list)) else [found]
        symbols = {s for s, kind in self.known.sizes.items() if kind in (self.nodes, self.edges)}
        sizes = [s for part in parts for s in getattr(part, "shape", [part]) if isinstance(s, torch.SymInt)]
        return any(size.node.expr.free_symbols & symbols for size in sizes)

    def _read(self, node: fx.Node) -> dict[fx.Node, int] | None:
        """Returns the level that an operation reads from each input, or None if it reads all rows."""
        rows, level = self.rows(node), self.levels.get(node, 0)
        if rows is None and _is_first_rows(node):
            return self._first_rows(node)
        if rows is None or level >= self.everything or (rows == self.edges and level >= len(self.known.hop_prefixes)):
            return None
        rule = _RULES.get(node.target) or (_pointwise if _is_pointwise(node) else None)
        read = rule(self, node, level) if rule is not None else None
        numbers = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.SymInt)]
        if read is None or not all(self._is_size(n) for n in numbers):
            return None
        return {n: level for n, level in read.items() if self.touches(n)}

    def _is_size(self, number: fx.Node) -> bool:
        """Whether an integer is a padded size itself, or does not depend on the number of nodes or edges."""
        return self.known.kind(number.meta.get("val")) is not None or not self.touches(number)

    def _first_rows(self, node: fx.Node) -> dict[fx.Node, int] | None:
        """Returns the level that a slice of first rows reads: a whole hop prefix, or at most the seeds. Else None."""
        source: Any = node.args[0]
        if self.rows(source) != self.nodes:
            return None
        number = value(node).shape[0]
        kinds = [self.known.kind(value(hop_prefix.nodes).shape[0]) for hop_prefix in self.known.hop_prefixes]
        if self.known.kind(number) in kinds:
            return {source: kinds.index(self.known.kind(number))}
        batch, now = current(), _compat.size_now(number)
        seeds = kinds[0]
        if seeds is None or batch is None or now is None or now > batch.counts[seeds] or self.touches(number):
            return None
        least = None if isinstance(number, torch.SymInt) else int(number)
        self.ctx.log.limits.append(RowLimit(seeds, batch.kinds[seeds], least))
        return {source: 0}


def _is_first_rows(node: fx.Node) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    given = arguments(node)
    return given["dim"] == 0 and given["start"] in (0, None) and given["step"] == 1


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in POINTWISE)
    return known and not mutates(node)


Read = dict[fx.Node, int]


def _pointwise(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    rank, sources = value(node).dim(), [n for n in node.all_input_nodes if w.touches(n)]
    fits = all(w.rows(n) == w.rows(node) and value(n).dim() == rank for n in sources)
    return dict.fromkeys(sources, level) if fits else None


def _row_by_row(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    """Reads the same rows of the first argument. The other arguments have no row per node or edge."""
    source, *others = [n for n in node.all_input_nodes if is_tensor(n)]
    if w.rows(source) != w.rows(node) or any(w.touches(n) for n in others) or not _keeps_rows(node, source):
        return None
    return {source: level}


def _keeps_rows(node: fx.Node, source: fx.Node) -> bool:
    """Whether an operation leaves the first axis alone, as far as its arguments name axes."""
    given, rank = arguments(node), value(source).dim()
    if "dims" in given:
        return bool(given["dims"][0] % rank == 0)  # a permutation of the axes
    places = rank + 1 if node.target is aten.unsqueeze.default else rank
    named = [given[name] for name in ("dim", "dim0", "dim1") if name in given]
    axes = [axis for one in named for axis in (one if isinstance(one, (list, tuple)) else [one])]
    return not (named and not axes) and all(axis is not None and axis % places != 0 for axis in axes)


def _normalised(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    """Reads the same rows of a batch norm that uses running statistics; in training it reads all rows."""
    return None if node.args[5] else _row_by_row(w, node, level)


def _joined(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    """Reads the same rows of tensors that are joined along another axis than the first."""
    parts: Any = node.args[0]
    dim = arguments(node)["dim"] % value(node).dim()
    return dict.fromkeys(parts, level) if dim != 0 and all(w.rows(p) == w.rows(node) for p in parts) else None


def _part(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    """Reads the same rows of the tuple that a tensor is taken from."""
    source: Any = node.args[0]
    return {source: level} if w.rows(source) == w.rows(node) else None


def _made(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    """Reads no rows: the tensor is made from a size alone."""
    counts = node.target in (aten.arange.start, aten.arange.start_step)
    return None if counts and node.args[0] != 0 else {}


def _gather(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    given: Any = node.args
    table, dim, index = given
    if dim != 0:
        return None
    if index in (w.row, w.col):
        return {table: level + (index is w.row), index: level}
    return None if w.touches(table) or w.rows(index) != w.rows(node) else {index: level}


def _embedding(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    given: Any = node.args
    table, index = given[:2]
    return None if w.touches(table) or w.rows(index) != w.rows(node) else {index: level}


def _segments(w: _Wanted, node: fx.Node, level: int) -> Read | None:
    given: Any = node.args
    source, index, size = given[:3]
    by_node = index is w.col and w.known.kind(value(size)) == w.nodes
    fits = by_node and level < len(w.known.hop_prefixes) and w.rows(source) == w.edges
    return {source: level, index: level} if fits else None


_RULES: dict[Any, Callable[[_Wanted, fx.Node, int], Read | None]] = {
    aten.index_select.default: _gather,
    aten.embedding.default: _embedding,
    own.segment_reduce.default: _segments,
    own.segment_softmax.default: _segments,
    aten.batch_norm.default: _normalised,
    aten.expand_as.default: _pointwise,
    operator.getitem: _part,
    **dict.fromkeys((aten.cat.default, aten.stack.default), _joined),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default), _made),
    **dict.fromkeys(
        (
            aten.linear.default,
            aten.mm.default,
            aten.matmul.default,
            aten.layer_norm.default,
            aten.dropout.default,
            aten.clone.default,
            aten.contiguous.default,
            aten.detach.default,
            aten.alias.default,
            aten.to.dtype,
            aten._to_copy.default,
            aten.empty_like.default,
            aten.full_like.default,
            aten.ones_like.default,
            aten.zeros_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.flatten.using_ints,
            aten.expand.default,
            aten.permute.default,
            aten.transpose.int,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.select.int,
            aten.slice.Tensor,
            aten.chunk.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
            aten.sum.dim_IntList,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.max.dim,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.prod.dim_int,
            aten.any.dim,
            aten.all.dim,
            aten.linalg_vector_norm.default,
            aten.norm.ScalarOpt_dim,
            aten.std.dim,
            aten.std.correction,
            aten.var.dim,
            aten.var.correction,
            aten.logsumexp.default,
            aten.softmax.int,
            aten.log_softmax.int,
            aten.cumsum.default,
            aten.glu.default,
        ),
        _row_by_row,
    ),
}
"""Rules for the rows that an operation reads to make a level of its result. Pointwise operations need no entry."""


class _Shorter:
    """Rewrites operations so that they make only the rows that are read."""

    def __init__(self, ctx: Context, wanted: _Wanted) -> None:
        self.ctx, self.wanted = ctx, wanted
        hop_prefixes = wanted.known.hop_prefixes
        self.parts: dict[tuple[fx.Node, int], fx.Node] = {}
        with ctx.graph.inserting_after(ctx.inputs_first()):
            anchor = ctx.call(aten.sym_size.int, hop_prefixes[-1].sources, 0)
        with ctx.graph.inserting_before(anchor):
            self.nodes = [*(ctx.call(aten.sym_size.int, hop_prefix.nodes, 0) for hop_prefix in hop_prefixes), anchor]
            self.edges = [ctx.call(aten.sym_size.int, hop_prefix.ends[0], 0) for hop_prefix in hop_prefixes]
            for level, hop_prefix in enumerate(hop_prefixes):
                self._lay_out(hop_prefix, level)

    def _lay_out(self, hop_prefix: HopPrefix, level: int) -> None:
        """Notes the layouts that came with a hop prefix. Its edges are already sorted by destination."""
        wanted, layouts = self.wanted, self.ctx.layouts
        row, col = (self.ctx.call(aten.to.dtype, end, torch.int64) for end in hop_prefix.ends)
        self.parts[wanted.row, level], self.parts[wanted.col, level] = row, col
        layouts[col, row] = [hop_prefix.rowptr, hop_prefix.ends[0]]
        if hop_prefix.by_source:
            layouts[row, col] = hop_prefix.by_source

    def run(self, short: list[fx.Node]) -> None:
        """Rewrites the graph in place."""
        for node in short:
            level, read = self.wanted.levels[node], self.wanted.read[node]
            given = {n: self._first(n, read[n]) if n in read else self._size(n, level) for n in node.all_input_nodes}
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
            self.ctx.find_value(node)
        drop_unused(self.ctx.graph)

    def _size(self, node: fx.Node, level: int) -> fx.Node:
        """Returns the number of nodes or edges in a hop prefix, if `node` is the number of all nodes or edges."""
        kind = self.wanted.known.kind(node.meta.get("val"))
        if kind == self.wanted.nodes:
            return self.nodes[level]
        return self.edges[level] if kind == self.wanted.edges else node

    def _first(self, node: fx.Node, level: int) -> fx.Node:
        """Returns the rows of `node` in a hop prefix, sliced if the node makes more rows."""
        if level == (self.wanted.levels[node] if self.wanted.is_short(node) else self.wanted.everything):
            return node
        if (node, level) not in self.parts:
            sizes = self.nodes if self.wanted.rows(node) == self.wanted.nodes else self.edges
            after = node if node.op == "call_function" else self.nodes[-1]
            with self.ctx.graph.inserting_after(after):
                self.parts[node, level] = self.ctx.call(aten.slice.Tensor, node, 0, 0, sizes[level])
        return self.parts[node, level]
