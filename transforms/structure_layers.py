"""What PyG's layers do to the edges inside their forward, and the same layers without it.

A layer with a flag for it has the flag set. A layer without gets a class whose forward is PyG's own, but for the
normalisation, which returns the edges as they are given.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    AGNNConv,
    ARMAConv,
    ChebConv,
    DNAConv,
    FeaStConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    LGConv,
    MessagePassing,
    MixHopConv,
    SGConv,
    SSGConv,
    TAGConv,
)
from torch_geometric.transforms import BaseTransform

from .add_self_loops import AddSelfLoops
from .cheb_norm import ChebNorm
from .gcn_norm import GCNNorm
from .self_loops import Fill

EdgeTypes = list[tuple[str, str, str]] | None


@dataclass(frozen=True)
class Need:
    """What a layer makes of the edges before it sends messages.

    Attributes:
        self_loops: whether every node has one self loop then.
        weights: the normalisation and its settings; None for a layer that computes no weights from the edges alone.
        fill: what `edge_attr` of new self loops is; None for a layer that does not read it.
    """

    self_loops: bool
    weights: tuple[Any, ...] | None = None
    fill: Fill | None = None

    def __str__(self) -> str:
        parts = ["self loops"] * self.self_loops + ["normalisation"] * (self.weights is not None)
        return " and ".join(parts)

    def transform(self, edge_types: EdgeTypes) -> BaseTransform:
        """The same before the model."""
        if self.weights is None:
            return AddSelfLoops(1.0 if self.fill is None else self.fill, "replace", edge_types)
        if self.weights[0] == "Laplacian":
            return ChebNorm(self.weights[1], edge_types=edge_types)
        loops, improved, flow = self.weights[1:]
        return GCNNorm(loops, improved, flow, edge_types=edge_types)


@dataclass(frozen=True)
class Rule:
    """How to read a layer's need, and how to make it rely on the data.

    Attributes:
        need: of a layer; None where its flags say that it takes the edges as they are.
        rely: changes a layer such that it does so.
        how: what that changes, in words.
    """

    need: Callable[[Any], Need | None]
    rely: Callable[[Any], None]
    how: str


def given_norm(edge_index: Tensor, edge_weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """The edges as they are, where a layer would normalise them."""
    return edge_index, edge_weight


def _without_norm(kind: type[MessagePassing]) -> type[MessagePassing]:
    forward = kind.forward
    given = types.FunctionType(
        forward.__code__, {**forward.__globals__, "gcn_norm": given_norm}, "forward", forward.__defaults__
    )
    given.__kwdefaults__, given.__doc__ = forward.__kwdefaults__, forward.__doc__
    name = f"Given{kind.__name__}"
    doc = f"`{kind.__name__}` that takes `edge_weight` as normalised already."
    return type(name, (kind,), {"forward": given, "__doc__": doc, "__module__": __name__, "__qualname__": name})


GivenARMAConv = _without_norm(ARMAConv)
GivenMixHopConv = _without_norm(MixHopConv)
GivenSGConv = _without_norm(SGConv)
GivenSSGConv = _without_norm(SSGConv)


class GivenChebConv(ChebConv):
    """`ChebConv` that takes `edge_index` and `edge_weight` as those of the scaled Laplacian."""

    def __norm__(self, edge_index: Tensor, num_nodes: Any, edge_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The edges as they are."""
        return edge_index, edge_weight


def _gcn(loops: bool, improved: bool, flow: str) -> Need:
    return Need(loops, ("GCN", loops, improved, flow))


def _switch_off(*flags: str) -> Callable[[Any], None]:
    def rely(layer: Any) -> None:
        for flag in flags:
            setattr(layer, flag, False)

    return rely


def _become(kind: type[nn.Module]) -> Callable[[Any], None]:
    def rely(layer: Any) -> None:
        layer.__class__ = kind

    return rely


_NORMALISED = Rule(
    lambda c: _gcn(c.add_self_loops, getattr(c, "improved", False), c.flow) if c.normalize else None,
    _switch_off("normalize", "add_self_loops"),
    "normalize=False, add_self_loops=False",
)
_WITHOUT_LOOPS = Rule(
    lambda c: _gcn(False, False, c.flow) if c.normalize else None, _switch_off("normalize"), "normalize=False"
)
_LOOPS = Rule(
    lambda c: Need(True, fill=_fill(c)) if c.add_self_loops else None,
    _switch_off("add_self_loops"),
    "add_self_loops=False",
)


def _fill(layer: Any) -> Fill | None:
    """What attention gives new self loops, where it reads features of edges."""
    return None if getattr(layer, "edge_dim", None) is None else layer.fill_value


def _always(kind: type[nn.Module], need: Callable[[Any], Need | None]) -> Rule:
    return Rule(need, _become(kind), kind.__name__)


RULES: dict[type[nn.Module], Rule] = {
    AGNNConv: _LOOPS,
    APPNP: _NORMALISED,
    ARMAConv: _always(GivenARMAConv, lambda c: _gcn(False, False, c.flow)),
    ChebConv: _always(GivenChebConv, lambda c: Need(True, ("Laplacian", c.normalization))),
    DNAConv: _NORMALISED,
    FeaStConv: _LOOPS,
    GATConv: _LOOPS,
    GATv2Conv: _LOOPS,
    GCN2Conv: _NORMALISED,
    GCNConv: _NORMALISED,
    LGConv: _WITHOUT_LOOPS,
    MixHopConv: _always(GivenMixHopConv, lambda c: _gcn(c.add_self_loops, False, c.flow)),
    # With cached=True these two keep what they have propagated, and look at no edge again.
    SGConv: _always(GivenSGConv, lambda c: None if c.cached else _gcn(c.add_self_loops, False, c.flow)),
    SSGConv: _always(GivenSSGConv, lambda c: None if c.cached else _gcn(c.add_self_loops, False, c.flow)),
    TAGConv: _WITHOUT_LOOPS,
}
"""By class; a subclass may do something else and is left as it is."""
