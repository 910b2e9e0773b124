"""Row-wise arithmetic behind a reduction is taken into its region.

Before: ``out = region([x], ...)[0]; y = add(out, mul(add(eps, 1), x))``
After:  ``y = region([x, eps], ...)[0]``
Why it pays: the sum is written once, in its final form, instead of being written, read and written again, and there is
one launch less.

In training the gradient must not ask for more than it would without: where it reads the bare sum (behind a ReLU, or for
the gradient of what multiplies it) that would be kept as well, and nothing is gained. So a step is taken only if the
region does not store more per row for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gnncompile.ir.region import Output, Space
from gnncompile.ir.vjp import with_residuals
from gnncompile.passes.context import same_size, value
from gnncompile.passes.message import POINTWISE, Message, NotFusable, Slots, is_one, narrow, number_of


def extend(message: Message, node: fx.Node, reduced: int) -> tuple[fx.Node, int]:
    """Follows the only users of a reduction as far as they can be part of its region.

    Args:
        message: The region so far.
        node: The reduction in the graph.
        reduced: Its value in the region.

    Returns:
        The last node that became part of the region, and its value in it; `node` and `reduced` if there is none.
    """
    top = node, reduced
    rows = _Rows(message, node, reduced)
    stored = _stored(message, *top)
    while len(top[0].users) == 1:
        (user,) = top[0].users
        if not rows.fits(user):
            break
        before = list(message.tensors)
        try:
            reached = user, rows.lower(user)
            if _stored(message, *reached) > stored:
                raise NotFusable("its gradient would need the bare sum")
        except NotFusable:
            message.tensors[:] = before
            break
        top = reached
    return top


def _stored(message: Message, node: fx.Node, result: int) -> int:
    """Bytes that a region with this result writes per row, residuals included."""
    fake = value(node)
    dtype = str(fake.dtype).removeprefix("torch.")
    region = message.builder.finish([Output(result, dtype, message.builder.nodes[result].shape)])
    wanted = [tensor in message.ctx.needs_grad for tensor, _ in message.tensors]
    outputs = with_residuals(region, (*wanted, False)).outputs  # position -1, the inverse degree, wants none
    return sum(math.prod(out.trailing) * getattr(torch, out.dtype).itemsize for out in outputs)


class _Rows:
    """Writes row-wise arithmetic as nodes of a region; to the rules of :data:`POINTWISE` it is a message."""

    def __init__(self, message: Message, node: fx.Node, reduced: int) -> None:
        self.message, self.builder = message, message.builder
        self.rank = value(node).dim() - 1
        self.values = {node: reduced}

    def fits(self, node: fx.Node) -> bool:
        """Whether a node's result has the rows of the reduction, and the region can compute it."""
        return self._computable(node) and self._has_rows(node)

    def lower(self, node: fx.Node) -> int:
        """The value of a node that fits."""
        self.values[node] = POINTWISE[node.target](self, node, self._slots(), False)  # type: ignore[arg-type]
        return self.values[node]

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """An operand of a pointwise operation, broadcast as torch does."""
        if isinstance(arg, (bool, int, float)):
            return self.builder.const(float(arg))
        if not isinstance(arg, fx.Node) or not isinstance(value(arg), torch.Tensor):
            raise NotFusable("an operand is a symbolic number")
        if value(arg).device != value(of).device:
            raise NotFusable("an operand is on another device")
        if arg in self.values:
            return self.values[arg]
        if self._has_rows(arg):
            return self._value(arg, Space.DESTINATION, value(arg).shape[1:], slots)
        every = (-1, *slots) if self._has_rows(of) else slots
        if value(arg).dim() > len(every):
            raise NotFusable("an operand has more axes than the result")
        return self._value(arg, Space.PARAMETER, value(arg).shape, every[len(every) - value(arg).dim() :])

    def _value(self, node: fx.Node, space: Space, sizes: Any, slots: Slots) -> int:
        narrowed = narrow(sizes, slots)
        # What the graph's structure determines is computed once per graph, outside the step.
        if len(node.users) == 1 and self._computable(node) and not self.message.ctx.structural.get(node):
            return POINTWISE[node.target](self, node, narrowed, False)  # type: ignore[arg-type]
        if space is Space.PARAMETER and any(s < 0 and not is_one(n) for s, n in zip(narrowed, sizes, strict=True)):
            raise NotFusable("an operand has rows of its own")
        return self.message.input(node, space, narrowed)

    def _computable(self, node: fx.Node) -> bool:
        ctx = self.message.ctx
        return (
            node.op == "call_function"
            and node.target in POINTWISE
            and value(node).dtype.is_floating_point
            and node not in ctx.written
            and self.message.visible(node)
        )

    def _has_rows(self, node: fx.Node) -> bool:
        shape = value(node).shape
        return len(shape) == self.rank + 1 and same_size(shape[0], number_of(self.message.num_rows))

    def _slots(self) -> Slots:
        heads = self.builder.nodes[next(iter(self.values.values()))].shape[0]
        return ((), (1,) if heads == 1 else (0,), (0, 1))[self.rank]
