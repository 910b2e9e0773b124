"""Row-wise arithmetic after a reduction becomes the epilogue of its region. Runs after differentiation, on each graph.

Before: ``out = region([x], ...)[0]; y = add(out, mul(add(eps, 1), x)); z = relu(y)``
After:  ``z = region([x, eps, x], ...)[0]``
Why it pays: a row is written once, in its final form, instead of being written, read and written again, and there is
one launch less. The pass serves the backward as well (``where(mask, 0, region(...)[0] + other_gradient)``). Before
differentiation it would be harmful: the gradient could need the bare sum, which would have to be kept too.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from gnncompile.device import device_of
from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import aten, drop_unused, own, value
from gnncompile.passes.pointwise import POINTWISE, NotFusable
from gnncompile.passes.row_arithmetic import RowArithmetic

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


class _Rows(RowArithmetic):
    """Writes what follows output `k` of a region."""

    def __init__(self, call: fx.Node, taken: fx.Node, k: int) -> None:
        tensors, _, spec = call.args
        self.region: Region = parse(spec)  # type: ignore[arg-type]
        self.k = k
        self.result = self.region.outputs[k].node
        shape = self.region.nodes[self.result].shape
        super().__init__(Builder.of(self.region), value(taken), shape, tensors)  # type: ignore[arg-type]
        self.double = self.region.double
        self.values[taken] = self.result

    def lower(self, user: fx.Node) -> None:
        """Takes an operation on the result into the region. Raises NotFusable, without changes, if it cannot."""
        if user.target in _VIEWS:
            self._view(user)
        elif self.computable(user) and self.has_rows(user):
            self.result = self.compute(user)
        else:
            raise NotFusable("it is no arithmetic on rows")
        self.values[user] = self.result

    def finish(self, fake: torch.Tensor) -> Region:
        """Returns the region with the result as output `k`, in the dtype and shape of `fake`."""
        outputs = list(self.region.outputs)
        trailing = tuple(int(s) for s in fake.shape[1:])
        outputs[self.k] = Output(self.result, storage_type(fake.dtype), trailing)
        return self.builder.finish(outputs)

    def _view(self, node: fx.Node) -> None:
        """Takes in a view of rows as (heads, channels), or as one axis (concatenated heads)."""
        trailing = tuple(value(node).shape[1:])
        if not self.same_rows(node) or trailing not in (self.shape, (self.shape[0] * self.shape[1],)):
            raise NotFusable("it reshapes rows")
        self.rank = len(trailing)
