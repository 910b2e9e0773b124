"""One layer of each kind, made of PyG's own classes, with its arguments, its target and its limit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch_geometric import nn as pyg

from benchmarks.cases import inputs, limits
from benchmarks.cases.graphs import Graph
from benchmarks.cases.inputs import EDGE_DIM, NUM_RELATIONS
from benchmarks.cases.limits import HEADS
from benchmarks.cases.nested import map_tensors
from benchmarks.cases.rgat_reference import RelationByRelation
from benchmarks.cases.targets import Target

AUTOCAST = "amp"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, AUTOCAST: torch.float32}
"""The precisions of cases, by the names that tables have, with the dtype of parameters and inputs.

Under `AUTOCAST` the model runs in `torch.autocast` to bfloat16.
"""
USUAL = ("fp32", "bf16")
"""The precisions that a command measures by default."""

# On a CPU one target holds for every layer but EdgeConv, which is bound by its products of edges.
CPU_TARGET = Target(over_eager=4.0, over_compile=1.0)


@dataclass(frozen=True)
class Layer:
    """One layer with `graph.channels` channels in and out.

    Attributes:
        make: builds the layer for a graph.
        make_inputs: makes its arguments, features first.
        limit: the least work of a step.
        cuda: the target on a GPU.
        cpu: the target on a CPU.
        reference: turns the layer into a module with the same results and parameters that needs less memory; None if
            this is not needed.
        all_grads: whether every floating-point argument gets a gradient, not only the features.
        ends_cuda: why `torch.compile`'s rows are not run on a GPU, where they would end the process; empty if they are.
    """

    make: Callable[[Graph], nn.Module]
    make_inputs: inputs.MakeInputs
    limit: limits.Limit
    cuda: Target
    cpu: Target = CPU_TARGET
    reference: Callable[[nn.Module], nn.Module] | None = None
    ends_cuda: str = ""
    all_grads: bool = False

    def in_precision(self, precision: str) -> "Layer":
        """Returns the layer in a precision, one of `DTYPES`."""
        layer = self.to(DTYPES[precision])
        if precision != AUTOCAST:
            return layer
        reference = None if layer.reference is None else partial(_autocast_reference, layer.reference)
        return replace(layer, make=lambda graph: Autocast(layer.make(graph)), reference=reference)

    def to(self, dtype: torch.dtype) -> "Layer":
        """Returns the layer with its parameters and its floating-point arguments in another dtype."""

        def converted(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        def make_inputs(graph: Graph, order: str, generator: Generator) -> tuple[Any, ...]:
            return tuple(map_tensors(converted, one) for one in self.make_inputs(graph, order, generator))

        limit = limits.core(self.limit, dtype, HEADS)
        return replace(self, make=lambda graph: self.make(graph).to(dtype), make_inputs=make_inputs, limit=limit)


class Autocast(nn.Module):
    """Runs a model under autocast to bfloat16. A model in float64 stays exact."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        """Runs the model on any arguments."""
        with torch.autocast(next(self.parameters()).device.type, torch.bfloat16):
            return self.model(*args)


def _autocast_reference(reference: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
    assert isinstance(model, Autocast)
    return Autocast(reference(model.model))


class Concatenated(nn.Module):
    """Concatenates the outputs of a layer on typed graphs to `[num_nodes, channels]`, in the order of node types."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]) -> Tensor:
        """Runs the layer on the features `x_dict` and the edges `edge_index_dict`."""
        out_dict: dict[str, Tensor] = self.layer(x_dict, edge_index_dict)
        return torch.cat([out_dict[kind] for kind in x_dict])


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


def _multi_head(layer: Callable[..., nn.Module], **options: Any) -> Callable[[Graph], nn.Module]:
    return lambda graph: layer(graph.channels, graph.channels // HEADS, heads=HEADS, **options)


def _square(layer: Callable[..., nn.Module], *arguments: Any, **options: Any) -> Callable[[Graph], nn.Module]:
    return lambda graph: layer(graph.channels, graph.channels, *arguments, **options)


def _pna(graph: Graph) -> nn.Module:
    in_degree = torch.bincount(graph.make()[1], minlength=graph.num_nodes)
    aggregators, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    make = _square(pyg.PNAConv, aggregators, scalers, deg=torch.bincount(in_degree))
    return make(graph)


def _hetero_sage(graph: Graph) -> nn.Module:
    return Concatenated(
        pyg.HeteroConv({kind: pyg.SAGEConv(graph.channels, graph.channels) for kind in inputs.EDGE_TYPES})
    )


def _hgt(graph: Graph) -> nn.Module:
    return Concatenated(pyg.HGTConv(graph.channels, graph.channels, inputs.METADATA, heads=HEADS))


def _over_compile(ratio: float) -> Target:
    return Target(over_compile=ratio)


PLAIN, FEATURES, TYPES, TYPED = inputs.plain, inputs.with_edge_features, inputs.with_edge_types, inputs.typed

LAYERS: dict[str, Layer] = {
    "GCN": Layer(_square(pyg.GCNConv), PLAIN, limits.aggregation(1), _over_compile(2.5)),
    "SAGE mean": Layer(_square(pyg.SAGEConv), PLAIN, limits.aggregation(2), _over_compile(1.8)),
    "SAGE max": Layer(_square(pyg.SAGEConv, aggr="max"), PLAIN, limits.sage_max, _over_compile(3.0)),
    "GraphConv": Layer(_square(pyg.GraphConv), PLAIN, limits.aggregation(2), _over_compile(1.8)),
    "GIN": Layer(
        lambda graph: pyg.GINConv(_mlp(graph.channels, graph.channels)),
        PLAIN,
        limits.aggregation(2),
        _over_compile(1.8),
    ),
    "GINE": Layer(
        lambda graph: pyg.GINEConv(_mlp(graph.channels, graph.channels), edge_dim=EDGE_DIM),
        FEATURES,
        limits.gine,
        _over_compile(2.0),
    ),
    "GAT": Layer(
        _multi_head(pyg.GATConv),
        PLAIN,
        limits.gat,
        Target(over_eager=12.0),
        ends_cuda="not run: its backward reads a misaligned address (seen with torch 2.11)",
    ),
    "GATv2": Layer(_multi_head(pyg.GATv2Conv), PLAIN, limits.gatv2, _over_compile(3.5)),
    "TransformerConv": Layer(_multi_head(pyg.TransformerConv), PLAIN, limits.transformer(), _over_compile(1.5)),
    "TransformerConv edge": Layer(
        _multi_head(pyg.TransformerConv, edge_dim=EDGE_DIM),
        FEATURES,
        limits.transformer(EDGE_DIM),
        _over_compile(2.0),
    ),
    "ResGated": Layer(_square(pyg.ResGatedGraphConv), PLAIN, limits.res_gated, _over_compile(1.8)),
    "GEN softmax": Layer(_square(pyg.GENConv, aggr="softmax"), PLAIN, limits.gen_softmax, _over_compile(3.0)),
    "PNA": Layer(_pna, PLAIN, limits.pna, _over_compile(3.0)),
    "EdgeConv": Layer(
        lambda graph: pyg.EdgeConv(_mlp(2 * graph.channels, graph.channels)),
        PLAIN,
        limits.edge_conv,
        _over_compile(1.5),
        Target(over_eager=1.5, over_compile=1.0),
    ),
    "CGConv": Layer(lambda graph: pyg.CGConv(graph.channels), PLAIN, limits.cg_conv, _over_compile(6.0)),
    "RGCN": Layer(_square(pyg.RGCNConv, NUM_RELATIONS), TYPES, limits.rgcn, _over_compile(2.0)),
    "HGT": Layer(_hgt, TYPED, limits.hgt, _over_compile(1.5)),
    # PyG's layer makes a matrix per edge: for 2,332,486 edges, 128 x 128 values of 4 bytes each are 153 GB.
    # A row may run out of memory, but the reference must not.
    "RGAT": Layer(
        _multi_head(pyg.RGATConv, num_relations=NUM_RELATIONS),
        TYPES,
        limits.rgat,
        _over_compile(1.5),
        reference=RelationByRelation.of,
    ),
    "HeteroConv(SAGE)": Layer(_hetero_sage, TYPED, limits.hetero_sage, _over_compile(1.5)),
}
