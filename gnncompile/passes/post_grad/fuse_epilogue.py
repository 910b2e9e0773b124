"""Row-wise arithmetic after a reduction becomes the epilogue of its region. Runs after differentiation, on each graph.

Before: ``out = region([x], ...)[0]; y = add(out, mul(add(eps, 1), x)); z = relu(y)``
After:  ``z = region([x, eps, x], ...)[0]``
Why it pays: a row is written once, in its final form, instead of being written, read and written again, and there is
one launch less. The pass serves the backward as well (``where(mask, 0, region(...)[0] + other_gradient)``). Before
differentiation it would be harmful: the gradient could need the bare sum, which would have to be kept too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from gnncompile.device import device_of
from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Shape, Space, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import aten, drop_unused, is_one, is_packed, is_tensor, own, same_size, value
from gnncompile.passes.pointwise import POINTWISE, NotFusable, Slots

_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in graph.find_nodes(op="call_function", target=own.region.default):
        region = parse(node.args[2])
        for k, out in enumerate(region.outputs):
            if region.per_row(out) and not region.tiled:
                node = _extend(graph, node, k)


def _extend(graph: fx.Graph, call: fx.Node, k: int) -> fx.Node:
    """Takes the chain of single users of output `k` into the region, and returns the call of the region."""
    taken = [u for u in call.users if u.target is operator.getitem and u.args[1] == k]
    if len(taken) != 1:
        return call
    rows, at, top = _Rows(call, taken[0], k), taken[0], taken[0]
    while len(at.users) == 1:
        (at,) = at.users
        if _is_left_to_a_product(at):
            break
        try:
            rows.lower(at)
        except NotFusable:
            break
        if at.target not in _VIEWS:
            top = at  # a view at the end of the chain stays outside
    if top is taken[0] or any(u <= top for other in call.users if other is not taken[0] for u in other.users):
        return call  # the new call is placed at `top`, after its last operand; other results must not be read earlier
    return _replace(graph, call, taken[0], top, rows)


def _is_left_to_a_product(node: fx.Node) -> bool:
    """Whether a node adds a product that only it reads, and no operation follows that a region could compute.

    Then ``gemm_epilogue`` adds the product in the sum's memory: the traffic is the same, but one matrix less is alive.
    """
    if node.target is not aten.add.Tensor or node.kwargs or not device_of(value(node).device).runs_triton:
        return False
    ends = all(user.op == "output" or user.target not in POINTWISE for user in node.users)
    return ends and any(term.target is aten.mm.default and len(term.users) == 1 for term in node.all_input_nodes)


def _replace(graph: fx.Graph, call: fx.Node, taken: fx.Node, top: fx.Node, rows: _Rows) -> fx.Node:
    region, k = rows.finish(value(top)), taken.args[1]
    verify(region)
    with graph.inserting_before(top):
        new = graph.call_function(own.region.default, (rows.tensors, call.args[1], region.spec))
        new.meta = {**call.meta, "val": [value(top) if i == k else v for i, v in enumerate(value(call))]}
        for old in list(call.users):
            item = graph.call_function(operator.getitem, (new, old.args[1]))
            item.meta = {**old.meta, "val": new.meta["val"][old.args[1]]}
            (top if old is taken else old).replace_all_uses_with(item)
    drop_unused(graph)
    return new


class _Rows:
    """Writes row-wise arithmetic as nodes of a region, for the rules of :data:`POINTWISE`."""

    def __init__(self, call: fx.Node, taken: fx.Node, k: int) -> None:
        tensors, _, spec = call.args
        self.region: Region = parse(spec)  # type: ignore[arg-type]
        self.k, self.tensors = k, list(tensors)  # type: ignore[arg-type]
        self.builder = Builder.of(self.region)
        self.result = self.region.outputs[k].node
        self.shape: Shape = self.builder.nodes[self.result].shape
        self.values = {taken: self.result}
        self.num_rows, self.rank, self.device = value(taken).shape[0], value(taken).dim() - 1, value(taken).device
        self.positions: dict[tuple[fx.Node, Space, Shape], int] = {}

    def lower(self, user: fx.Node) -> None:
        """Takes an operation on the result into the region. Raises NotFusable, without changes, if it cannot."""
        if user.target in _VIEWS:
            self._view(user)
        elif self._computable(user) and self._has_rows(user):
            self.result = self._compute(user)
        else:
            raise NotFusable("it is no arithmetic on rows")
        self.values[user] = self.result

    def finish(self, fake: torch.Tensor) -> Region:
        """Returns the region with the result as output `k`, in the dtype and shape of `fake`."""
        outputs = list(self.region.outputs)
        trailing = tuple(int(s) for s in fake.shape[1:])
        outputs[self.k] = Output(self.result, storage_type(fake.dtype), trailing)
        return self.builder.finish(outputs)

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the region node of an operand of a pointwise operation, broadcast as torch does."""
        if isinstance(arg, (bool, int, float)):
            return self.builder.const(float(arg))
        if not is_tensor(arg):
            raise NotFusable("an operand is a symbolic number")
        if arg in self.values:
            return self.values[arg]
        if arg.target is aten.full.default and isinstance(arg.args[1], (int, float)) and not arg.args[0]:
            return self.builder.const(float(arg.args[1]))
        if value(arg).device != self.device:
            raise NotFusable("an operand is on another device")
        if len(arg.users) == 1 and self._computable(arg):
            with suppress(NotFusable):
                return self._compute(arg)
        return self._input(arg)

    def _compute(self, node: fx.Node) -> int:
        before = len(self.tensors), dict(self.positions)
        try:
            return POINTWISE[node.target](self, node, (), False)
        except NotFusable:
            del self.tensors[before[0] :]
            self.positions = before[1]
            raise

    def _input(self, node: fx.Node) -> int:
        fake = value(node)
        if not fake.dtype.is_floating_point and fake.dtype != torch.bool:
            raise NotFusable(f"an operand has type {fake.dtype}")
        if (fake.dtype == torch.float64) != self.region.double and fake.dtype != torch.bool:
            raise NotFusable("an operand has another precision")
        if not is_packed(fake):
            raise NotFusable("an operand would have to be copied")
        own_rows = self._has_rows(node)
        space = self.region.by if own_rows else Space.PARAMETER
        shape = self._shape(fake.shape[1:] if own_rows else fake.shape)
        key = node, space, shape
        if key not in self.positions:
            self.positions[key] = len(self.tensors)
            self.tensors.append(node)
        return self.builder.input(self.positions[key], space, shape, storage_type(fake.dtype))

    def _shape(self, sizes: Sequence[Any]) -> Shape:
        """Returns the feature shape (heads, channels) of an operand with these sizes."""
        while len(sizes) > self.rank and is_one(sizes[0]):
            sizes = sizes[1:]
        if len(sizes) > self.rank:
            raise NotFusable("an operand has rows of its own")
        heads, channels = self.shape
        if self.rank < 2:  # a row is flat, whether or not the region has heads
            found = self.shape if sizes and not is_one(sizes[0]) else (1, 1)
        else:
            wide = [not is_one(s) for s in (1, 1, *sizes)[-2:]]
            found = heads if wide[0] else 1, channels if wide[1] else 1
        if found[0] * found[1] != _count(sizes):
            raise NotFusable("an operand is wider than the result")
        return found

    def _view(self, node: fx.Node) -> None:
        """Takes in a view of rows as (heads, channels), or as one axis (concatenated heads)."""
        trailing = tuple(value(node).shape[1:])
        if not self._same_rows(node) or trailing not in (self.shape, (self.shape[0] * self.shape[1],)):
            raise NotFusable("it reshapes rows")
        self.rank = len(trailing)

    def _computable(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target not in POINTWISE or not is_tensor(node):
            return False
        if value(node).dtype == torch.bool:  # a mask: comparing once more costs less than storing it
            compared = [value(n) for n in node.all_input_nodes]
            return bool(compared) and all(map(self._fits, compared))
        return self._fits(value(node))

    def _fits(self, fake: Any) -> bool:
        """Whether a tensor is floating, and is float64 exactly if the region computes in float64."""
        floating = isinstance(fake, torch.Tensor) and fake.dtype.is_floating_point
        return floating and (fake.dtype == torch.float64) == self.region.double

    def _has_rows(self, node: fx.Node) -> bool:
        return value(node).dim() == self.rank + 1 and self._same_rows(node)

    def _same_rows(self, node: fx.Node) -> bool:
        fake = value(node)
        return bool(fake.dim() > 0 and same_size(fake.shape[0], self.num_rows))


def _count(sizes: Sequence[Any]) -> int:
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            raise NotFusable("an operand has a symbolic width")
        count *= size
    return count
