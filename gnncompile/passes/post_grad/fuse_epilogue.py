"""Row-wise arithmetic after a region becomes the epilogue of the region. Runs after differentiation, on each graph.

Before: ``out = region([x], ...)[0]; y = add(out, mul(add(eps, 1), x)); z = relu(y)``
After:  ``z = region([x, eps, x], ...)[0]``
Why it pays: a row is written once, in its final form, instead of being written, read and written again, and there is
one launch less. The pass serves the backward as well (``where(mask, 0, region(...)[0] + other_gradient)``). Before
differentiation it would be harmful: the gradient could need the bare sum, which would have to be kept too.

Values per edge have such epilogues too. If a layer adds something to a state of edges, the gradient of the state is the
gradient of the next state plus a result of the layer's region. The region adds both, and the readers of the sum read
one matrix instead of two.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from gnncompile.device import device_of
from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import BITS, Output, Region, Space, behind, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import aten, drop_unused, own, value
from gnncompile.passes.edge_inputs import MOST_READ
from gnncompile.passes.pointwise import POINTWISE, NotFusable
from gnncompile.passes.row_arithmetic import RowArithmetic
from gnncompile.passes.stored_arithmetic import is_stored

_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}


_LONGEST = 64
"""The most operations of an epilogue."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in graph.find_nodes(op="call_function", target=own.region.default):
        region = parse(node.args[2])
        for k, out in enumerate(region.outputs):
            if _takes_epilogue(region, out):
                node = _extend(node, k)


def _takes_epilogue(region: Region, out: Output) -> bool:
    """Whether a result of a region may have an epilogue.

    A walk leaves the values of edges that are masked out zero. A walk in tiles would store a value per edge once more
    if its other results need the value without the epilogue.
    """
    if not region.per_edge(out):
        return region.per_row(out) and not region.tiled
    others = [other.node for other in region.outputs if other is not out]
    is_needed = region.tiled and out.node in behind(region.nodes, others)
    return region.unmasked and out.dtype != BITS and not is_needed


def _extend(call: fx.Node, k: int) -> fx.Node:
    """Takes the chain of single users of output `k` into the region, and returns the call of the region."""
    taken = [u for u in call.users if u.target is operator.getitem and u.args[1] == k]
    if len(taken) != 1:
        return call
    region: Region = parse(str(call.args[2]))
    kind = _EdgeRows if region.per_edge(region.outputs[k]) else _Rows
    rows, at, top = kind(call, taken[0], k), taken[0], taken[0]
    for _ in range(_LONGEST):
        if len(at.users) != 1:
            break
        (at,) = at.users
        if _is_left_to_a_product(at):
            break
        try:
            rows.lower(at)
        except NotFusable:
            break
        if at.target not in _VIEWS:
            top = at  # a view at the end of the chain stays outside
    return call if top is taken[0] else _replace(call, taken[0], top, rows)


def _is_left_to_a_product(node: fx.Node) -> bool:
    """Whether a node adds a product that only it reads, and no operation follows that a region could compute.

    Then ``gemm_epilogue`` adds the product in the sum's memory: the traffic is the same, but one matrix less is alive.
    """
    if node.target is not aten.add.Tensor or node.kwargs or not device_of(value(node).device).runs_triton:
        return False
    ends = all(user.op == "output" or user.target not in POINTWISE for user in node.users)
    return ends and any(term.target is aten.mm.default and len(term.users) == 1 for term in node.all_input_nodes)


def _replace(call: fx.Node, taken: fx.Node, top: fx.Node, rows: _Rows) -> fx.Node:
    """Puts a region in the place of a call, and returns its call. It gives `top` as the result that `taken` picked."""
    graph, k, region = call.graph, taken.args[1], rows.finish(value(top))
    verify(region)
    with graph.inserting_before(rows.last.next):
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
        self.call, self.k = call, k
        self.result = self.region.outputs[k].node
        shape = self.region.nodes[self.result].shape
        super().__init__(Builder.of(self.region), value(taken), shape, tensors)  # type: ignore[arg-type]
        self.double = self.region.double
        self.values[taken] = self.result
        for node in self.region.inputs:
            if not node.through_index:  # what the region reads already is not added again
                self._positions[self.tensors[int(node.value or 0)], node.space, node.shape] = int(node.value or 0)

    @property
    def last(self) -> fx.Node:
        """The last of the nodes that the region and its epilogue read. The new call follows it."""
        return max([self.call, *self.tensors])

    def lower(self, user: fx.Node) -> None:
        """Takes an operation on the result into the region. Raises NotFusable, without changes, if it cannot."""
        before = list(self.tensors), dict(self._positions), self.result, self.rank
        if user.target in _VIEWS:
            self._view(user)
        elif self.computable(user) and self.has_rows(user):
            self.result = self.compute(user)
        else:
            raise NotFusable("it is no arithmetic on rows")
        if not self.allows(user):
            self.tensors, self._positions, self.result, self.rank = before
            raise NotFusable("another result would change or come too late, or this one would become wider")
        self.values[user] = self.result

    def allows(self, user: fx.Node) -> bool:
        """Whether the region may give the result of an operation.

        The new call follows its last operand. So no other result may be read before that, and none may be an operand.
        """
        last = self.last
        others = [item for item in self.call.users if item.args[1] != self.k]
        return not any(item in self.tensors or any(reader <= last for reader in item.users) for item in others)

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


class _EdgeRows(_Rows):
    """Writes what follows output `k` of a region, which has a row per edge.

    A sum, and what is computed for it, may read other stored matrices with a row per edge: the readers of the sum then
    read one matrix instead of two. All else may read only matrices that the region reads anyway, or that nobody else
    reads: the readers of a mask often read it again.
    """

    def __init__(self, call: fx.Node, taken: fx.Node, k: int) -> None:
        super().__init__(call, taken, k)
        self.by = Space.EDGE
        self._itemsize = value(taken).dtype.itemsize
        self._is_sum = False
        self._given = len(self.tensors)

    def lower(self, user: fx.Node) -> None:
        """See :meth:`_Rows.lower`."""
        self._is_sum = user.target in (aten.add.Tensor, aten.sub.Tensor)
        super().lower(user)

    def allows(self, user: fx.Node) -> bool:
        """See :meth:`_Rows.allows`. The region must round the other results as before, and store no wider type."""
        is_wider = value(user).dtype.itemsize > self._itemsize
        return not is_wider and super().allows(user) and self.region.rounds_like(self.finish(value(user)))

    def input(self, node: fx.Node) -> int:
        """Returns the region node that reads a tensor. Raises NotFusable if the region must not read it."""
        if self.has_rows(node) and node not in self.tensors:
            if not is_stored(node) or not (self._is_sum or len(node.users) == 1):
                raise NotFusable("an operand would be stored, or read, once more")
            if sum(map(self.has_rows, self.tensors[self._given :])) == MOST_READ:
                raise NotFusable("it reads too many matrices")
        return super().input(node)
