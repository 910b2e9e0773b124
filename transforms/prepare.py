"""Moves self loops and normalisation, which a model computes in every forward, into a transform before the model."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.nn.to_hetero_transformer import key2str
from torch_geometric.transforms import Compose

from gnncompile.capture.compile import callable_of
from gnncompile.exc import ArgumentError

from .same_results import Call, arguments, call_by_names, difference, results, tolerance
from .self_loops import fills
from .structure_layers import RULES, Need


@dataclass(frozen=True)
class Moved:
    """A layer that now relies on the transform.

    Attributes:
        layer: the layer's name in the model.
        kind: the class that it had before.
        what: the work that it does no longer.
        how: the change to the layer: of its flags, or of its class.
    """

    layer: str
    kind: str
    what: str
    how: str


@dataclass(frozen=True)
class Left:
    """A layer that was not changed.

    Attributes:
        layer: the layer's name in the model.
        kind: its class.
        what: the work that it still does in every forward.
        why: the reason why this work was not moved.
    """

    layer: str
    kind: str
    what: str
    why: str


@dataclass(frozen=True)
class PrepareReport:
    """The changes that :func:`prepare` made.

    Attributes:
        moved: layers that were changed.
        left: layers that do such work but were not changed, each with the reason.
        outputs_differ: largest difference of outputs on the given data, relative to the largest output.
        gradients_differ: largest difference of the gradients of parameters and node features, relative to the largest.
    """

    moved: tuple[Moved, ...]
    left: tuple[Left, ...]
    outputs_differ: float
    gradients_differ: float

    def __str__(self) -> str:
        lines = [f"{len(self.moved)} layers rely on the data now, {len(self.left)} are left as they were"]
        lines += [f"  {m.layer} ({m.kind}): {m.what} moved before the model; now {m.how}" for m in self.moved]
        lines += [f"  {m.layer} ({m.kind}): {m.what} left, because {m.why}" for m in self.left]
        if self.moved:
            lines.append(
                f"outputs on the given data differ by {self.outputs_differ:.1e}, "
                f"gradients by {self.gradients_differ:.1e}"
            )
        return "\n".join(lines)


class Prepared(NamedTuple):
    """The result of :func:`prepare`: the new model, the transform of its inputs, and a report."""

    model: nn.Module
    transform: Compose
    report: PrepareReport


class _Layer(NamedTuple):
    name: str
    module: MessagePassing
    need: Need | None

    def left(self, why: str) -> Left:
        return Left(self.name, type(self.module).__name__, str(self.need), why)

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"


def prepare(model: nn.Module, data: Data | HeteroData, call: Call | None = None) -> Prepared:
    """Moves self loops and normalisation, which layers compute from the edges in every forward, into a transform.

    Layers that read the same edges must need the same self loops and normalisation. For :class:`HeteroData`, the edge
    type in a layer's name says which edges it reads (:class:`~torch_geometric.nn.HeteroConv`,
    :func:`~torch_geometric.nn.to_hetero`). Both models are run on `data` in eval mode. If outputs or gradients differ
    by more than rounding, nothing is changed, and the report says so.

    .. code-block:: python

        model, transform, report = prepare(model, data)
        data = transform(data)  # every input of the new model must have gone through the transform
        out = model(data.x, data.edge_index, data.edge_weight)

    Supported layers are :class:`~torch_geometric.nn.GCNConv`, `APPNP`, `GCN2Conv`, `DNAConv`, `TAGConv`, `LGConv`,
    `SGConv`, `SSGConv`, `MixHopConv`, `ARMAConv` and `ChebConv`, to which the model must pass `edge_weight`; and
    `GATConv`, `GATv2Conv`, `AGNNConv` and `FeaStConv`.

    Args:
        model: any PyG model, not compiled yet. It is not changed; the new model has the same `state_dict` keys.
        data: a graph, or a batch, on which the two models are compared.
        call: runs a model on data. By default each argument of `forward` is the attribute of `data` with the same name,
            for :class:`HeteroData` with or without `_dict`.

    Returns:
        The new model, the transform of its inputs, and the changes (:class:`PrepareReport`).

    Raises:
        ValueError: the model is compiled, its parameters have no shape yet, or its arguments are not in `data`.
    """
    if callable_of(model) is not None:
        raise ArgumentError("model: got a compiled model, expected the model itself; prepare it first, then compile it")
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise ArgumentError(
            "model: got parameters without a shape, expected a model that has been called once; call it"
        )
    can_weigh = call is not None or not {"edge_weight", "edge_weight_dict", "data"}.isdisjoint(
        signature(model.forward).parameters
    )
    if call is None:
        arguments(model, data)
        call = call_by_names
    prepared = copy.deepcopy(model)
    moved, left, transforms = [], [], []
    for kind, layers in _by_edges(prepared, data).items():
        wanting = [layer for layer in layers if layer.need is not None]
        why = _obstacle(layers, data, kind, can_weigh)
        if why:
            left += [layer.left(why) for layer in wanting]
        elif wanting:
            transforms.append(_first_with_fill(wanting).transform(None if kind is None else [kind]))
            moved += [_rely(layer) for layer in wanting]
    if moved:
        transform = Compose(transforms)
        expected = results(model, data, call)
        found = results(prepared, transform(data), call)
        apart = [difference(*pair) for pair in zip(found, expected, strict=True)]
        if max(apart) <= tolerance([*expected[0], *expected[1]]):
            return Prepared(prepared, transform, PrepareReport(tuple(moved), tuple(left), *apart))
        why = f"results would differ by {max(apart):.1e}: the model does more with its edges than its layers"
        left += [Left(m.layer, m.kind, m.what, why) for m in moved]
    return Prepared(copy.deepcopy(model), Compose([]), PrepareReport((), tuple(left), 0.0, 0.0))


def _by_edges(model: nn.Module, data: Data | HeteroData) -> dict[Any, list[_Layer]]:
    """Groups the layers by the edge type that they read; "?" if a layer's edge type is unknown."""
    groups: dict[Any, list[_Layer]] = {}
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing):
            rule = RULES.get(type(module))
            kind = _edge_type(name, data) if isinstance(data, HeteroData) else None
            layer = _Layer(name or "model", module, None if rule is None else rule.need(module))
            groups.setdefault(kind, []).append(layer)
    return groups


def _edge_type(name: str, data: HeteroData) -> Any:
    parts = set(name.split("."))
    for kind in data.edge_types:
        if parts & {ModuleDict.to_internal_key(kind), key2str(kind)}:
            return kind
    return "?"


def _obstacle(layers: Sequence[_Layer], data: Any, kind: Any, can_weigh: bool) -> str | None:
    """Returns why the work of these layers on their edges can't be moved, or None if it can."""
    wanting = [layer for layer in layers if layer.need is not None]
    needs = [layer.need for layer in layers if layer.need is not None]
    if not wanting:
        return None
    if kind == "?":
        return "its name does not tell which edge type it reads"
    with_loops = [layer for layer in wanting if layer.need is not None and layer.need.self_loops]
    without = [layer for layer in layers if layer not in with_loops]
    if with_loops and without:
        return f"{without[0]} reads the same edges without self loops"
    if len({need.weights for need in needs if need.weights}) > 1:
        return f"{wanting[0]} and others normalise the same edges in different ways"
    weighs, read = any(need.weights for need in needs), [need.fill for need in needs if need.fill is not None]
    if weighs and read:
        return "others give features of self loops to the same edges"
    if any(not _same(fill, read[0]) for fill in read):
        return "others give other features to self loops of the same edges"
    if weighs and not can_weigh:
        return "forward of the model takes no edge_weight; give it one and hand it on to the layers"
    return _obstacle_in(data, kind, _first_with_fill(wanting))


def _obstacle_in(data: Any, kind: Any, need: Need) -> str | None:
    """Returns why the edges of `data` can't be changed as a layer needs, or None if they can."""
    store = next(store for store in data.edge_stores if kind is None or store._key == kind)
    if "edge_index" not in store:
        return "its edges are held as a matrix"
    if store.is_bipartite():
        return f"{kind} joins two types of nodes"
    weight = store.get("edge_weight")
    if need.weights is not None and isinstance(weight, Tensor) and weight.requires_grad:
        return "edge_weight takes a gradient"
    if need.self_loops:
        try:
            fills(store, 1.0)
        except ValueError as error:
            return f"self loops would have no value there ({error})"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _first_with_fill(layers: Sequence[_Layer]) -> Need:
    """Returns the most specific need of the layers: one with weights, else one with features of self loops."""
    needs = [layer.need for layer in layers if layer.need is not None]
    return max(needs, key=lambda need: (need.weights is not None, need.fill is not None))


def _rely(layer: _Layer) -> Moved:
    rule, kind = RULES[type(layer.module)], type(layer.module).__name__
    rule.rely(layer.module)
    return Moved(layer.name, kind, str(layer.need), rule.how)
