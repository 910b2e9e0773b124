"""Tiled regions to test: dense layers per edge, norms, edge states, sums, maxima, positions."""

from collections.abc import Callable

import torch
from torch import Tensor

from gnncompile.ir import rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.cutting import trailing
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.stages import Backward
from gnncompile.ir.vjp import vjp

S, D, E, P, W = Space.SOURCE, Space.DESTINATION, Space.EDGE, Space.PARAMETER, Space.FEATURE


class Maker:
    """Builds a tiled region whose inputs take the next tensor position each.

    Attributes:
        rows: For each tensor, its space, its rows if it is a parameter or a weight, and its feature shape.
    """

    def __init__(self, dtype: str = "float32", unmasked: bool = True) -> None:
        self.b, self.dtype = Builder(D, unmasked, tiled=True), dtype
        self.rows: list[tuple[Space, int, tuple[int, ...]]] = []

    def input(self, space: Space, channels: int, heads: int = 1) -> int:
        """Adds an input of `[rows, heads, channels]`."""
        self.rows.append((space, 1, (heads, channels)))
        return self.b.input(len(self.rows) - 1, space, (heads, channels), self.dtype)

    def layer(self, value: int, channels: int, bias: bool = True) -> int:
        """Adds a linear layer."""
        self.rows.append((W, self.b.nodes[value].shape[1], (1, channels)))
        out = self.b.linear(value, self.b.input(len(self.rows) - 1, W, (1, channels), self.dtype))
        return self.b.op("add", out, self.input(P, channels)) if bias else out

    def norm(self, value: int) -> int:
        """Adds a layer norm with weight and bias."""
        b, channels = self.b, self.b.nodes[value].shape[1]
        away = b.op("sub", value, b.op("div", b.sum_axis(value, 1), b.const(channels)))
        variance = b.op("div", b.sum_axis(b.op("mul", away, away), 1), b.const(channels))
        unit = b.op("div", away, b.op("sqrt", b.op("add", variance, b.const(1e-5))))
        return b.op("add", b.op("mul", unit, self.input(P, channels)), self.input(P, channels))

    def tensors(self, num_rows: int, num_columns: int, num_edges: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns random tensors for the region. Weights are scaled so that layers keep the size of their values."""
        counts = {S: num_columns, D: num_rows, E: num_edges}
        made = []
        for space, rows, shape in self.rows:
            scale = rows**-0.5 if space is W else 1.0
            made.append(scale * torch.randn(counts.get(space, rows), *trailing(shape), dtype=torch.float64))
        return [tensor.to(dtype) for tensor in made]

    def finish(self, *values: int) -> Region:
        """Returns the region with these outputs."""
        return self.b.finish([Output(v, self.dtype, trailing(self.b.nodes[v].shape)) for v in values])


def mesh_graph_net(make: Maker, channels: int = 24) -> Region:
    """The edge layer of MeshGraphNet: a state per edge and its sum per row."""
    b, state = make.b, make.input(E, channels)
    first = b.op("add", make.layer(state, channels), b.op("add", make.input(S, channels), make.input(D, channels)))
    after = b.op("add", state, make.norm(make.layer(rules.relu(b, first), channels)))
    return make.finish(after, b.reduce("sum", after))


def equivariant(make: Maker, channels: int = 20) -> Region:
    """The edge layer of EGNN: messages, and steps along the edges."""
    b = make.b
    away = b.op("sub", make.input(D, 3), make.input(S, 3))
    squared = b.sum_axis(b.op("mul", away, away), 1)
    first = b.op("add", b.op("mul", squared, make.input(P, channels)), make.input(D, channels))
    first = rules.silu(b, b.op("add", first, make.input(S, channels)))
    message = rules.silu(b, make.layer(first, channels))
    length = make.layer(rules.silu(b, make.layer(message, channels)), 1, bias=False)
    return make.finish(b.reduce("sum", message), b.reduce("sum", b.op("mul", away, length)))


def filters(make: Maker, channels: int = 40) -> Region:
    """The filters of SchNet: radial functions of distances, two layers, a product with gathered rows."""
    b, functions = make.b, 37
    away = b.op("sub", make.input(D, 3), make.input(S, 3))
    distance = b.op("sqrt", b.op("add", b.sum_axis(b.op("mul", away, away), 1), b.const(1e-3)))
    off = b.op("sub", distance, make.input(P, functions))
    basis = b.op("exp", b.op("neg", b.op("mul", off, off)))
    weight = make.layer(rules.softplus(b, make.layer(basis, channels)), channels)
    return make.finish(b.reduce("sum", b.op("mul", weight, make.input(S, channels))))


def maximum(make: Maker, channels: int = 36) -> Region:
    """The maximum of EdgeConv with two layers."""
    b = make.b
    first = rules.relu(b, b.op("add", make.input(D, channels), make.input(S, channels)))
    return make.finish(b.reduce("max", make.layer(first, channels + 5)))


def states(make: Maker, channels: int = 33) -> Region:
    """States that are only stored, with a layer between rows of both ends."""
    b = make.b
    both = b.op("mul", make.input(S, channels), make.input(D, channels))
    return make.finish(make.layer(rules.silu(b, make.layer(both, channels)), 7))


def skip(make: Maker, channels: int = 20) -> Region:
    """A residual block: a hidden row that a layer and a sum read, and a norm behind it."""
    b = make.b
    first = rules.silu(b, b.op("add", make.layer(make.input(E, channels), channels), make.input(S, channels)))
    return make.finish(b.reduce("sum", make.norm(b.op("add", rules.silu(b, make.layer(first, channels)), first))))


def residual(make: Maker, channels: int = 32) -> Region:
    """A residual block without a norm: a layer, a sum over all edges and the residual read one wide cotangent."""
    b, x = make.b, make.input(E, channels)
    return make.finish(b.op("add", x, make.layer(rules.silu(b, make.layer(x, channels)), channels)))


def gated(make: Maker, channels: int = 24) -> Region:
    """The edge layer of GatedGCN: its gradient reads the states that it gives."""
    b, source = make.b, make.input(S, channels)
    raw = b.op(
        "add",
        make.layer(make.input(E, channels), channels),
        b.op("add", make.input(S, channels), make.input(D, channels)),
    )
    gate = b.op("sigmoid", raw)
    return make.finish(raw, b.reduce("sum", gate), b.reduce("sum", b.op("mul", gate, source)))


def directed(make: Maker, channels: int = 20) -> Region:
    """The edge layer of D-MPNN: the sign of a state tells its gradient where the ReLU passed it on."""
    b = make.b
    state = rules.relu(b, b.op("add", make.input(E, channels), make.layer(make.input(E, channels), channels)))
    return make.finish(state, b.reduce("sum", state))


def shared(make: Maker, channels: int = 24) -> Region:
    """A gate of the sum of gathered rows and rows of edges, whose gradients are the same value."""
    b = make.b
    raw = make.layer(make.input(E, channels), channels)
    both = b.op("add", make.input(S, channels), make.input(E, channels))
    return make.finish(raw, b.reduce("sum", b.op("mul", b.op("sigmoid", raw), both)))


def widths(make: Maker, channels: int = 20) -> Region:
    """A number per edge from layers of two widths, whose weights' gradients read the same number."""
    b, rows = make.b, make.input(E, channels)
    total = b.op("add", *(b.sum_axis(make.layer(rows, width, bias=False), 1) for width in (32, 17)))
    return make.finish(total, b.reduce("sum", b.op("mul", b.op("tanh", total), make.input(S, channels))))


def gradient_of(region: Region, visible: int) -> Backward:
    """The gradient of a region whose first outputs have cotangents, so many as are `visible` to a user."""
    return vjp(region, (True,) * region.count, tuple(k < visible for k in range(len(region.outputs))))


def tiled_gradient_of(region: Region, visible: int) -> Region:
    """The walk in tiles among the regions of a gradient: see :func:`gradient_of`."""
    return next(stage.region for stage in gradient_of(region, visible).stages if stage.region.tiled)


REGIONS: dict[str, Callable[[Maker], Region]] = {
    "mesh_graph_net": mesh_graph_net,
    "equivariant": equivariant,
    "filters": filters,
    "maximum": maximum,
    "states": states,
    "skip": skip,
    "residual": residual,
    "gated": gated,
    "directed": directed,
    "shared": shared,
    "widths": widths,
}
"""Functions that make a region, by name."""
