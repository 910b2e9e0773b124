"""Follows edge tensors whose removed self loops are only masked, and takes the dead edges out of the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import aten, own, same_size, value
from gnncompile.passes.context import Context

Mask = tuple[str, Any]
"""How a mask is computed: ``("is", alive)`` with a node, ``("all", size)``, ``("cat", masks)`` or ``("and", masks)``.

Equal masks compare equal.
"""


class Edges(NamedTuple):
    """Which edges of a masked tensor are alive.

    Attributes:
        mask: The mask of its live edges.
        size: The number of its edges, dead ones included.
        axis: The axis along which they lie; None for a tuple of tensors, and where the sizes don't tell it.
    """

    mask: Mask
    size: Any
    axis: int | None


@dataclass
class MaskedEdges:
    """The masked tensors of a graph. Add them in the order of the graph.

    Attributes:
        ctx: The context of the graph.
        found: The masked tensors, each with its edges; None where the mask can't be told.
    """

    ctx: Context
    found: dict[fx.Node, Edges | None] = field(default_factory=dict)
    _unmasked: dict[Any, tuple[fx.Node, int]] = field(default_factory=dict)
    _alive: dict[Mask, fx.Node] = field(default_factory=dict)

    def __contains__(self, node: object) -> bool:
        return node in self.found

    def add(self, node: fx.Node) -> None:
        """Adds an operation that marks edges dead, or that keeps the edges of its masked arguments in place."""
        self.found[node] = self._marked(node) if node.target is own.mark_dead.default else self._kept(node)

    def without_dead(self, node: fx.Node) -> fx.Node | None:
        """Adds the live edges of a masked tensor, whose number depends on the data; None if the mask can't be told."""
        edges = self.found[node]
        if edges is None or edges.axis is None:
            return None
        if edges.mask not in self._alive:
            alive = self._built(edges.mask)
            with _compat.fresh_sizes(self.ctx.fake_mode):
                places = self.ctx.call(aten.nonzero.default, alive, like=node)
            self._alive[edges.mask] = self.ctx.call(aten.select.int, places, 1, 0, like=node)
        return self.ctx.call(aten.index_select.default, node, edges.axis, self._alive[edges.mask], like=node)

    def counted(self, output: fx.Node) -> fx.Node | None:
        """Returns a node that counts dead edges by the size of a masked tensor, or None.

        The size is returned or computed with, or is that of a result without a mask. A size that a graph without masked
        results may have from its inputs, the number of edges, is not suspected.
        """
        returned = [self.found[n] for n in output.all_input_nodes if n in self.found]
        joined = [one for one in self.found.values() if one is not None and one.mask[0] == "cat"]
        sizes = {_key(one.size): one.size for one in (*returned, *joined) if one is not None}
        if not sizes:
            return None
        for node in output.all_input_nodes:
            shape = () if node in self.found else getattr(node.meta.get("val"), "shape", ())
            if any(_key(size) in sizes for size in shape if isinstance(size, torch.SymInt)):
                return node
        for node in self.ctx.graph.nodes:
            size = node.meta.get("val")
            if isinstance(size, torch.SymInt) and _key(size) in sizes and any(map(_computes, _readers(node))):
                return node  # type: ignore[no-any-return]
        return None

    def _marked(self, node: fx.Node) -> Edges | None:
        rows: Any = node.args[0]
        alive: Any = node.args[1]
        if alive in self.found:
            return None
        mask: Mask = ("is", alive)
        if rows in self.found:
            inner = self.found[rows]
            if inner is None:
                return None
            mask = ("and", (inner.mask, mask))
        return _placed(node, mask, value(alive).shape[0])

    def _kept(self, node: fx.Node) -> Edges | None:
        sources = [self.found[n] for n in node.all_input_nodes if n in self.found]
        known = [one for one in sources if one is not None]
        if len(known) < len(sources):
            return None
        if node.target is aten.cat.default:
            axis: Any = node.args[1] if len(node.args) > 1 else 0
            axis %= value(node).dim()
            if any(one.axis in (None, axis) for one in known):
                return self._joined(node, axis)
        if any(one.mask != known[0].mask for one in known):
            return None
        return _placed(node, known[0].mask, known[0].size)

    def _joined(self, node: fx.Node, axis: int) -> Edges | None:
        """The edges of a tensor to which other edges are appended."""
        masks: list[Mask] = []
        for part in node.args[0]:  # type: ignore[union-attr]
            edges = self.found.get(part)  # type: ignore[arg-type]
            if edges is None:
                size = value(part).shape[axis]  # type: ignore[arg-type]
                key = _key(size)
                self._unmasked.setdefault(key, (part, axis))  # type: ignore[arg-type]
                masks.append(("all", key))
            elif edges.axis != axis:
                return None
            else:
                masks.append(edges.mask)
        return Edges(("cat", tuple(masks)), value(node).shape[axis], axis)

    def _built(self, mask: Mask) -> fx.Node:
        kind, content = mask
        if kind == "is":
            return content  # type: ignore[no-any-return]
        if kind == "all":
            rows, axis = self._unmasked[content]
            size = self.ctx.call(aten.sym_size.int, rows, axis)
            return self.ctx.call(aten.full.default, [size], True, dtype=torch.bool, device=value(rows).device)
        parts = [self._built(part) for part in content]
        if kind == "cat":
            return self.ctx.call(aten.cat.default, parts)
        return self.ctx.call(aten.logical_and.default, *parts)


def _placed(node: fx.Node, mask: Mask, size: Any) -> Edges:
    """The edges of a result, which lie along the only axis that is as long as the mask."""
    made = value(node)
    axes = [axis for axis, length in enumerate(getattr(made, "shape", ())) if same_size(length, size)]
    return Edges(mask, size, axes[0] if len(axes) == 1 else None)


def _key(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _readers(size: fx.Node) -> Iterator[fx.Node]:
    """Yields the operations that read a size, or a number computed from it."""
    for user in size.users:
        if isinstance(user.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield from _readers(user)
        else:
            yield user


def _computes(node: fx.Node) -> bool:
    """Whether a reader of a size uses it as a number, not as the shape of a result."""
    return node.op == "output" or torch.Tag.pointwise in getattr(node.target, "tags", ())
