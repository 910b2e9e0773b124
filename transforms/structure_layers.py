"""The self loops and normalisation that PyG's layers compute in their forward, and how to switch them off.

If a layer has a flag for this, the flag is set. Otherwise the layer gets a subclass whose forward is PyG's own, except
that the normalisation returns the edges unchanged.
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
    """The work that a layer does on the edges before it sends messages.

    Attributes:
        self_loops: whether the layer gives every node one self loop.
        weights: the normalisation and its settings; None for a layer that computes no weights from the edges alone.
        fill: the `edge_attr` of new self loops; None for a layer that does not read `edge_attr`.
    """

    self_loops: bool
    weights: tuple[Any, ...] | None = None
    fill: Fill | None = None

    def __str__(self) -> str:
        parts = ["self loops"] * self.self_loops + ["normalisation"] * (self.weights is not None)
        return " and ".join(parts)

    def transform(self, edge_types: EdgeTypes) -> BaseTransform:
        """Returns the transform that does the same work before the model."""
        if self.weights is None:
            return AddSelfLoops(1.0 if self.fill is None else self.fill, "replace", edge_types)
        if self.weights[0] == "Laplacian":
            return ChebNorm(self.weights[1], edge_types=edge_types)
        loops, improved, flow = self.weights[1:]
        return GCNNorm(loops, improved, flow, edge_types=edge_types)


@dataclass(frozen=True)
class Rule:
    """How to find a layer's need, and how to switch that work off in the layer.

    Attributes:
        need: returns the need of a layer; None if its flags say that it takes the edges as they are.
        rely: changes a layer so that it takes the edges as they are.
        how: the change that `rely` makes, in words.
    """

    need: Callable[[Any], Need | None]
    rely: Callable[[Any], None]
    how: str


def given_norm(edge_index: Tensor, edge_weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Replaces `gcn_norm` in a layer's forward: returns the edges unchanged."""
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
        """Returns the edges unchanged."""
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
    """Returns the `edge_attr` of an attention layer's new self loops; None if it reads no features of edges."""
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
    # With cached=True these two layers keep their propagated features, and never read the edges again.
    SGConv: _always(GivenSGConv, lambda c: None if c.cached else _gcn(c.add_self_loops, False, c.flow)),
    SSGConv: _always(GivenSSGConv, lambda c: None if c.cached else _gcn(c.add_self_loops, False, c.flow)),
    TAGConv: _WITHOUT_LOOPS,
}
"""The rules, by exact class: a subclass may do something else, so it is left as it is."""
