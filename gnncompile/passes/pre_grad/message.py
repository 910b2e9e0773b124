"""Writes the per-edge message of a reduction as region nodes.

Feature axes of torch tensors are mapped to the two axes of a region, (heads, channels): slot 0 and slot 1. A tensor
that cannot be expressed becomes an input of the region: it is computed outside, stored per edge, and recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import FEATURE_MAXIMA, SEED, Region, Shape, Space
from gnncompile.passes.analysis import ONCE, aten, guarded_same, is_one, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.pointwise import POINTWISE, NotFusable, Slots
from gnncompile.passes.pre_grad import edge_linears, picked_heads
from gnncompile.passes.pre_grad.dropout import seed_of
from gnncompile.passes.pre_grad.normalize_sizes import number_of, size_node
from gnncompile.passes.pre_grad.other_ends import other_ends
from gnncompile.passes.pre_grad.resolve_edge_lists import alive_of

MAX_WIDTH = 8192

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types of messages that have kernels."""

ONE_OTHER_END = "a message can gather from one other end of its edges only"
"""Why rows are stored that an index chooses which is neither end of the edges."""

_INVERSE_DEGREE = -1
"""The index that stands for the tensor that :meth:`Message.bind` makes from the layout."""


class _NoFreeAxis(NotFusable):
    """A sum over a feature axis needs a region axis, and the axes of its result take both."""


class Message:
    """One message under construction, reduced by `index` to `num_rows` rows."""

    def __init__(self, ctx: Context, at: fx.Node, index: fx.Node, num_rows: Any) -> None:
        self.ctx, self.at, self.index, self.num_rows = ctx, at, index, num_rows
        self.source: fx.Node | None = None
        self.num_columns: Any = None
        self.source_needs_grad = False
        self.builder = Builder(Space.DESTINATION)
        self.tensors: list[tuple[fx.Node, Space]] = []
        self.positions: dict[tuple[fx.Node, Space, Shape], int] = {}
        self.known: dict[tuple[fx.Node, Slots], int] = {}
        self.components = 1
        self.stores_rows = False

    def root(self, src: fx.Node) -> int:
        """Returns the region node of the message. Raises NotFusable if it has more than two feature axes."""
        rank = value(src).dim() - 1
        self.components = value(src).shape[1] if rank == 2 else 1
        if rank > 2:
            raise NotFusable(f"messages with {rank} feature axes have no kernel yet; found shape {_shape(src)}")
        try:
            found = self.lower(src, ((), (1,), (0, 1))[rank], strict=True)
        except NotFusable:
            # [num_edges, heads] from a dot product over channels: its only axis is then slot 0.
            found = self.lower(src, ((), (0,), (0, 1))[rank])
        if self.builder.nodes[found].space is Space.PARAMETER:
            raise NotFusable("it is the same for all edges")
        return found

    def rows_per_edge(self, gather: fx.Node) -> int:
        """Returns the region node of rows gathered by the index of this message, stored per edge."""
        rank = value(gather).dim() - 1
        if rank > 2:
            raise NotFusable(f"rows with {rank} feature axes have no kernel yet")
        self.stores_rows = True
        return self.builder.on_edges(self._gather(gather, ((), (1,), (0, 1))[rank]))

    def lower(self, node: fx.Node, slots: Slots, strict: bool = False) -> int:
        """Returns the region node of a tensor with a row per edge. A tensor that cannot be lowered becomes an input.

        With `strict`, a feature sum that finds no free axis raises instead.
        """
        key = (node, slots)
        if key not in self.known:
            saved = dict(self.known), self.source, self.num_columns
            try:
                self.known[key] = self._operation(node, slots, strict)
            except NotFusable as reason:
                if strict and isinstance(reason, _NoFreeAxis):
                    raise
                self.known, self.source, self.num_columns = saved
                if _is_message_op(node):
                    self.skip(f"{_name(node)} stored per edge", str(reason), node)
                self.known[key] = self.input(node, Space.EDGE, slots)
        return self.known[key]

    def computed(self) -> dict[fx.Node, int]:
        """Returns the nodes of the graph that the region computes, with their region nodes."""
        return {node: at for (node, _), at in self.known.items() if self.builder.nodes[at].op != "input"}

    def skip(self, what: str, reason: str, node: fx.Node) -> None:
        """Records why an operation is not part of the message."""
        self.ctx.skip(what, reason, node)

    # Leaves.

    def input(self, node: fx.Node, space: Space, slots: Slots) -> int:
        """Returns the region node of a tensor that the region reads. Raises NotFusable if no region can read it."""
        fake = value(node)
        if node in self.ctx.written:
            raise NotFusable("it reads a tensor that is written to in place")
        if fake.dtype != torch.bool and not fake.dtype.is_floating_point:
            raise NotFusable(f"a message reads a tensor of type {fake.dtype}")
        sizes = fake.shape if space is Space.PARAMETER else fake.shape[1:]
        shape = region_shape(sizes, slots)
        return self.builder.input(self._position(node, space, shape), space, shape, storage_type(fake.dtype))

    def _position(self, node: fx.Node, space: Space, shape: Shape) -> int:
        """Returns the position of a tensor. One that is read with two feature shapes has two positions."""
        key = (node, space, shape)
        if key not in self.positions:
            self.positions[key] = len(self.tensors)
            self.tensors.append((node, space))
        return self.positions[key]

    def _gather(self, node: fx.Node, slots: Slots) -> int:
        table, index = node.args[0], node.args[2]
        assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
        if index in self.ctx.written:
            raise NotFusable("its index is written to in place")
        if not self.visible(table):
            raise NotFusable("it is gathered under another gradient or autocast mode")
        rows = value(table).shape[0]
        if index is self.index:
            if not guarded_same(rows, number_of(self.num_rows)):
                raise NotFusable("rows gathered at the destination are not as many as the result's")
            return self.input(table, Space.DESTINATION, slots)
        if not same_size(value(index).shape[0], value(self.index).shape[0]):
            raise NotFusable("its index has another length than the edges")
        if not self._is_other_end(index, rows):
            if self._reads_through_index(node):
                return self._through_index(table, index, slots)
            raise NotFusable(ONE_OTHER_END)
        found = self.input(table, Space.SOURCE, slots)
        if self.source is None:
            self.source = index
            with self.ctx.graph.inserting_before(self.at):
                self.num_columns = self._size_node(table)
        self.source_needs_grad |= table in self.ctx.needs_grad
        return found

    def _reads_through_index(self, gather: fx.Node) -> bool:
        """Whether a region reads rows that an index chooses, instead of reading them from memory.

        In training :mod:`gnncompile.passes.post_grad.read_through_index` does so: a gradient may keep the rows.
        """
        ctx, index = self.ctx, gather.args[2]
        plain = ctx.is_plain and alive_of(ctx, index) is None  # type: ignore[arg-type]
        return plain and not ctx.needs_grad and gather.args[0] not in ctx.written and makes_messages(gather)

    def _through_index(self, table: fx.Node, index: fx.Node, slots: Slots) -> int:
        """Returns the region node of the rows of a table that an index chooses."""
        shape, rows = region_shape(value(table).shape[1:], slots), value(table).shape[0]
        if not value(table).dtype.is_floating_point:
            raise NotFusable(f"a message gathers rows of type {value(table).dtype}")
        key = f"{index.name} among {rows} rows"
        row = self.ctx.shared_nodes.get(key)
        if row is None or self.at < row:
            with self.ctx.graph.inserting_before(self.at):
                size = size_node(self.ctx, table, self.at)
            with self.ctx.after([index, size]):  # a gather of the rows' numbers checks the index, as eager does
                kind = {"dtype": torch.int32, "device": value(index).device}
                numbers = self.ctx.call(aten.arange.default, size, like=index, **kind)
                row = self.ctx.call(aten.index_select.default, numbers, 0, index, like=index)
                row.meta[ONCE] = True
            self.ctx.shared_nodes[key] = row
        places = self._position(table, Space.EDGE, shape), self._position(row, Space.EDGE, (1, 1))
        return self.builder.through_index(*places, shape, storage_type(value(table).dtype))

    def _is_other_end(self, index: fx.Node, rows: Any) -> bool:
        """Whether an index is the other end of the edges, and a table has as many rows as others gathered there."""
        if self.source is None:
            return index in self.other_ends or not self.other_ends
        return index is self.source and guarded_same(rows, number_of(self.num_columns))

    @cached_property
    def other_ends(self) -> frozenset[fx.Node]:
        """The indices that may be the other end of the edges; empty if any may."""
        return other_ends(self.ctx, self.index)

    def _size_node(self, table: fx.Node) -> Any:
        rows = value(table).shape[0]
        if isinstance(rows, int):
            return rows
        if same_size(rows, number_of(self.num_rows)):
            return self.num_rows
        return size_node(self.ctx, table, self.at)

    def inverse_degree(self) -> int:
        """Returns the node of 1 / (number of live edges of the row), for means. :meth:`bind` makes its tensor."""
        dtype = "float64" if value(self.at).dtype == torch.float64 else "float32"
        return self.builder.input(_INVERSE_DEGREE, Space.DESTINATION, (1, 1), dtype)

    def reduced(self, kind: str, message: int) -> int:
        """Returns the node of a reduction over the edges of each row: "sum", "mean", "max" or "min"."""
        result = self.builder.reduce("sum" if kind == "mean" else kind, message)
        return self.builder.op("mul", result, self.inverse_degree()) if kind == "mean" else result

    def bind(self, region: Region, layout: list[fx.Node]) -> tuple[Region, list[fx.Node]]:
        """Returns the region with its inputs renumbered, and the tensors that it reads, in that order."""
        tensors: list[fx.Node] = []
        nodes = []
        for node in region.nodes:
            if node.op == "input":
                old = int(node.value or 0)
                inverse = old == _INVERSE_DEGREE
                tensor = self._inverse_degree(layout[0], node.dtype) if inverse else self.tensors[old][0]
                nodes.append(replace(node, value=len(tensors)))
                tensors.append(tensor)
            else:
                nodes.append(node)
        return replace(region, nodes=tuple(nodes)), tensors

    def _inverse_degree(self, rowptr: fx.Node, dtype: str) -> fx.Node:
        key = f"inverse degree of {rowptr.name} in {dtype}"
        if key not in self.ctx.shared_nodes:
            with self.ctx.after([rowptr]):
                self.ctx.shared_nodes[key] = self.ctx.call(own.inverse_degree.default, rowptr, dtype)
        return self.ctx.shared_nodes[key]

    # Operations.

    def visible(self, node: fx.Node) -> bool:
        """Whether a node runs under the same grad and autocast modes as the reduction."""
        switches = self.ctx.switches
        return not switches or switches.get(node) == switches.get(self.at)

    def _operation(self, node: fx.Node, slots: Slots, strict: bool) -> int:
        if node.op != "call_function" or not self.visible(node):
            raise NotFusable("it is an input")
        if node in self.ctx.written:
            raise NotFusable("it is written to in place")
        if node in self.ctx.stored:
            return self.input(node, Space.EDGE, slots)
        if self.ctx.structural.get(node) and value(node).dtype.is_floating_point:
            return self.input(node, Space.EDGE, slots)  # the structure program computes it once per graph
        if node.target is aten.index_select.default and node.args[1] == 0:
            return self._gather(node, slots)
        if node.target is own.mark_dead.default:
            return self.lower(node.args[0], slots, strict)  # type: ignore[arg-type]
        if node.target is own.segment_softmax.default:
            if node.args[1] is not self.index:
                raise NotFusable("a softmax over other groups than the reduction's")
            return self.builder.softmax(self.lower(node.args[0], slots, strict))  # type: ignore[arg-type]
        if (layer := edge_linears.layer_of(node)).target is aten.linear.default:
            return self._layer(layer, node, slots)
        if (picked := picked_heads.of(node)) is not None and slots[:1] == (0,):
            return self._picked_heads(picked, node, slots)
        if node.target in VIEWS:
            return self._reshape(node, slots, strict)
        if node.target in (aten.dropout.default, own.edge_dropout.default):
            return self._dropout(node, slots, strict)
        if node.target is aten.sum.dim_IntList:
            return self._feature_sum(node, slots, strict)
        if node.target in _FEATURE_SOFTMAXES:
            return self._feature_softmax(node, slots, strict)
        if node.target in POINTWISE:
            return POINTWISE[node.target](self, node, slots, strict)
        raise NotFusable(f"{_name(node)} is not a pointwise operation")

    def _layer(self, layer: fx.Node, node: fx.Node, slots: Slots) -> int:
        """Returns the region node of a linear layer of edge features. `node` may be its view as heads."""
        shape = region_shape(value(node).shape[1:], slots)
        reason = edge_linears.refusal(self.ctx, layer, self.components if shape[0] == 1 else 1)
        if not reason and not (self.visible(layer) and makes_messages(layer)):
            reason = "its rows are used otherwise as well, or made in another mode"
        if reason:
            self.skip("linear layer stored per edge", reason, layer)
            raise NotFusable(reason)
        rows, weight = layer.args[:2]
        features = self.input(rows, Space.EDGE, (1,))  # type: ignore[arg-type]
        return self.product(features, weight, shape)  # type: ignore[arg-type]

    def product(self, features: int, weight: fx.Node, shape: Shape) -> int:
        """Returns the region node of the product of each edge's features with a weight, `[outputs, features]`."""
        position = self._position(edge_linears.transposed(self.ctx, weight, self.at), Space.FEATURE, shape)
        dtype = storage_type(value(weight).dtype)
        return self.builder.linear(features, self.builder.input(position, Space.FEATURE, shape, dtype))

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the region node of an operand of a pointwise operation, broadcast as torch does."""
        if isinstance(arg, (bool, int, float)):
            return self.builder.const(float(arg))
        if not isinstance(arg, fx.Node) or not isinstance(value(arg), torch.Tensor):
            raise NotFusable("an operand is a symbolic number")
        rank, full = value(arg).dim(), value(of).dim()
        if rank == full and (row := self._row_of_all(arg)) is not None:
            return self.input(row, Space.PARAMETER, narrow(value(row).shape, slots))
        if rank == full and same_size(value(arg).shape[0], value(of).shape[0]):
            return self.lower(arg, narrow(value(arg).shape[1:], slots), strict)
        if rank == full and not is_one(value(arg).shape[0]):
            raise NotFusable(f"an operand of shape {_shape(arg)} does not have a row per edge")
        sizes = value(arg).shape[1:] if rank == full else value(arg).shape
        kept = slots[len(slots) - len(sizes) :]
        narrowed = narrow(sizes, kept)
        return self.input(arg, Space.PARAMETER, (-1, *narrowed) if rank == full else narrowed)

    def _row_of_all(self, node: fx.Node) -> fx.Node | None:
        """Returns a tensor with the one row that all edges have in rows of one number, such as zeros. Else None."""
        gathers = node.target is aten.index_select.default and node.args[1] == 0
        filled: Any = node.args[0] if gathers else node
        if filled.target is not aten.full.default or {node, filled} & self.ctx.written:
            return None
        fake, number = value(filled), filled.args[1]
        sizes = list(fake.shape[1:])
        if not isinstance(number, (int, float)) or not all(isinstance(size, int) for size in sizes):
            return None
        key = f"one row of {filled.name}"
        if key not in self.ctx.shared_nodes:
            with self.ctx.graph.inserting_before(filled):
                row = self.ctx.call(aten.full.default, sizes, number, dtype=fake.dtype, device=fake.device)
            self.ctx.shared_nodes[key] = row
        return self.ctx.shared_nodes[key]

    def _reshape(self, node: fx.Node, slots: Slots, strict: bool) -> int:
        """Lowers a view that adds, drops or expands axes of length 1."""
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        before, after = value(inner).shape, value(node).shape
        if len(before) == 0 or len(after) == 0 or not same_size(before[0], after[0]):
            raise NotFusable(f"it reshapes {_shape(inner)} to {_shape(node)}")
        if node.target in (aten.expand.default, aten.expand_as.default):
            if len(before) != len(after):
                raise NotFusable("it adds an axis")
            return self.lower(inner, narrow(before[1:], slots), strict)
        wide = [(s, k) for s, k in zip(after[1:], slots, strict=True) if not is_one(s)]
        kept = [s for s in before[1:] if not is_one(s)]
        if len(kept) != len(wide) or not all(same_size(a, b) for a, (b, _) in zip(kept, wide, strict=True)):
            raise NotFusable(f"it reshapes {_shape(inner)} to {_shape(node)}")
        remaining = iter(k for _, k in wide)
        return self.lower(inner, tuple(-1 if is_one(s) else next(remaining) for s in before[1:]), strict)

    def _dropout(self, node: fx.Node, slots: Slots, strict: bool) -> int:
        """Lowers a dropout in training. The pass ``functionalize`` has removed all other dropouts."""
        inner, b = node.args[0], self.builder
        p = node.args[1] if node.target is aten.dropout.default else node.args[2]
        if not isinstance(inner, fx.Node) or not isinstance(p, (int, float)):
            raise NotFusable("the probability of a zero is not a number")
        kept = self.lower(inner, slots, strict)
        if p == 1:
            return b.op("mul", kept, b.const(0))
        shape = region_shape(value(node).shape[1:], slots)
        seed = seed_of(self.ctx, node) if node.target is aten.dropout.default else node.args[1]
        position = self._position(seed, Space.PARAMETER, (1, 1))  # type: ignore[arg-type]
        factor = b.dropout(b.input(position, Space.PARAMETER, (1, 1), SEED), float(p), shape)
        return b.op("mul", kept, factor)

    def _picked_heads(self, picked: picked_heads.Picked, node: fx.Node, slots: Slots) -> int:
        """Lowers ``w[:, order]``: each head of the result takes the row of one of a few heads of `w`."""
        if {picked.rows, picked.order} & self.ctx.written or not makes_messages(node):
            raise NotFusable("its rows are used otherwise as well")
        with self.ctx.graph.inserting_before(self.at):
            rows, masks = picked_heads.parts(self.ctx, picked, self.at)
        heads = [self.input(row, Space.EDGE, slots[1:]) for row in rows]
        result = heads[-1]
        for mask, head in zip(masks, heads, strict=False):
            result = self.builder.op("where", self.input(mask, Space.PARAMETER, (0,)), head, result)
        return result

    def _feature_sum(self, node: fx.Node, slots: Slots, strict: bool) -> int:
        inner: Any = node.args[0]
        dims: Any = node.args[1]
        keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
        rank = value(inner).dim()
        axes = sorted(d % rank for d in dims)
        if len(axes) != 1 or axes[0] == 0 or node.kwargs.get("dtype") is not None:
            raise NotFusable("it sums over more than one feature axis")
        at = axes[0] - 1
        outer = list(slots[:at]) + list(slots[at + 1 :] if keep else slots[at:])
        taken = [k for k in outer if k >= 0]
        free = [k for k in (1, 0) if k not in taken and all((k > t) == (at > i) for i, t in enumerate(outer) if t >= 0)]
        if not free:
            raise _NoFreeAxis("its sum over a feature axis finds no free axis")
        inside = (*outer[:at], free[0], *outer[at:])
        summed = self.lower(inner, tuple(inside), strict)
        return self._sum(summed, free[0], int(value(inner).shape[axes[0]]))

    def _sum(self, summed: int, axis: int, length: int) -> int:
        """Returns the node of the sum over a feature axis of this length, along which a value may broadcast."""
        full = self.builder.nodes[summed].shape
        full = (length, full[1]) if axis == 0 else (full[0], length)
        return self.builder.sum_to(summed, (1, full[1]) if axis == 0 else (full[0], 1), full)

    def _feature_softmax(self, node: fx.Node, slots: Slots, strict: bool) -> int:
        """Lowers a softmax over a feature axis, or its logarithm."""
        b, args = self.builder, node.args
        axis = int(args[1]) % value(node).dim()  # type: ignore[arg-type]
        if axis == 0 or len(args) > 2 or node.kwargs.get("dtype") is not None:
            raise NotFusable("it is a softmax over edges, or in another type")
        slot = slots[axis - 1]  # -1 for an axis of length 1
        logits = self.operand(args[0], node, slots, strict)
        shifted = b.op("sub", logits, b.over_features(FEATURE_MAXIMA[slot], logits) if slot >= 0 else logits)
        powers = b.op("exp", shifted)
        total = self._sum(powers, slot, int(value(node).shape[axis])) if slot >= 0 else powers
        if node.target is aten.log_softmax.int:
            return b.op("sub", shifted, b.op("log", total))
        return b.op("div", powers, total)


def makes_messages(node: fx.Node) -> bool:
    """Whether the rows of a node reach only reductions over edges, through operations that regions compute."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if at.target is own.segment_reduce.default:
            continue
        if at in seen:
            continue
        if not at.users or (at is not node and not (at.target in COMPUTED and as_many_rows(at, node))):
            return False
        seen.add(at)
        todo.extend(at.users)
    return True


def as_many_rows(one: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors have the same number of rows."""
    a, b = value(one).shape, value(other).shape
    return len(a) > 0 and same_size(a[0], b[0])


def narrow(sizes: Iterable[Any], slots: Slots) -> Slots:
    """Returns the slots of a tensor that broadcasts to one with these slots: -1 for its axes of length 1."""
    return tuple(-1 if is_one(s) else k for s, k in zip(sizes, slots, strict=True))


def region_shape(sizes: Any, slots: Slots) -> Shape:
    """Returns the feature shape of a value of a region. Raises NotFusable if a region has no such value."""
    shape = [1, 1]
    order = [k for k in slots if k >= 0]
    if order != sorted(set(order)):
        raise NotFusable("its axes are not in the order of the message's")
    for size, slot in zip(sizes, slots, strict=True):
        if slot >= 0:
            shape[slot] = int(size)  # widths are static: a symbolic one is specialised here
    if shape[0] * shape[1] > MAX_WIDTH:
        raise NotFusable(f"rows of {shape[0] * shape[1]} elements are wider than the {MAX_WIDTH} a kernel takes")
    if 0 in shape:
        raise NotFusable("it has an axis of length 0")
    return shape[0], shape[1]


def _shape(node: fx.Node) -> str:
    return str(tuple(value(node).shape))


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def _is_message_op(node: fx.Node) -> bool:
    """Whether not fusing a node stores an edge tensor that fusing avoids. Inputs and linear layers do not count."""
    return node.op == "call_function" and (
        node.target in POINTWISE
        or node.target in (aten.index_select.default, own.segment_softmax.default, aten.dropout.default)
    )


VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.expand_as.default,
    aten._unsafe_view.default,
}
"""Views that add, drop or expand axes."""

_FEATURE_SOFTMAXES = {aten.softmax.int, aten.log_softmax.int}

COMPUTED = {
    *POINTWISE,
    *VIEWS,
    *_FEATURE_SOFTMAXES,
    aten.sum.dim_IntList,
    aten.dropout.default,
    own.edge_dropout.default,
    own.mark_dead.default,
    own.segment_softmax.default,
}
"""Operations that a region can compute per edge."""
