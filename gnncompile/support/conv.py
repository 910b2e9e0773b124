"""Cases for the layers of ``torch_geometric.nn.conv``."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import conv

from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import EDGE_CHANNELS as D
from gnncompile.support.case import TYPES, Absent, Case, Graph, degrees

H = C // 2
"""The number of features of each of two heads."""

EDGES = ("x", "edge_index")
WEIGHTED = (*EDGES, "edge_weight")
FEATURES = {"edge_attr": "edge_attr"}


def mlp(first: int, last: int) -> nn.Module:
    """Returns a perceptron with one hidden layer."""
    return nn.Sequential(nn.Linear(first, C), nn.ReLU(), nn.Linear(C, last))


def _typed_nodes(graph: Graph) -> dict[str, torch.Tensor]:
    return {"a": graph.x, "b": graph.x0}


def _typed_edges(graph: Graph) -> dict[tuple[str, str, str], torch.Tensor]:
    return {("a", "to", "b"): graph.edge_index, ("b", "back", "a"): graph.other_edge_index}


_METADATA = (["a", "b"], [("a", "to", "b"), ("b", "back", "a")])


def _neighbours(graph: Graph) -> torch.Tensor:
    """Returns four random neighbours of each node, where the nodes stand for the edges of a mesh."""
    near = graph.integers(graph.nodes, graph.nodes, 4, seed=20)
    return torch.stack([torch.arange(graph.nodes).repeat_interleave(4), near.flatten()])


CONV: tuple[Case | Absent, ...] = (
    Absent("MessagePassing", "the base class; layers of users' own are among the tests"),
    Case("SimpleConv", conv.SimpleConv),
    Case("SimpleConv [combined]", lambda: conv.SimpleConv("mean", "self_loop"), WEIGHTED),
    Case("GCNConv", lambda: conv.GCNConv(C, C)),
    Case("GCNConv [weights]", lambda: conv.GCNConv(C, C, improved=True), WEIGHTED),
    Case("GCNConv [no normalisation]", lambda: conv.GCNConv(C, C, normalize=False), WEIGHTED),
    Case("ChebConv", lambda: conv.ChebConv(C, C, K=3)),
    Case("SAGEConv", lambda: conv.SAGEConv(C, C)),
    Case("SAGEConv [max]", lambda: conv.SAGEConv(C, C, aggr="max", project=True)),
    Case("SAGEConv [several]", lambda: conv.SAGEConv(C, C, aggr=["mean", "max", "std"], normalize=True)),
    Absent("CuGraphSAGEConv", "needs pylibcugraphops"),
    Case("GraphConv", lambda: conv.GraphConv(C, C), WEIGHTED),
    Absent("GravNetConv", "needs torch-cluster for its neighbours"),
    Case("GatedGraphConv", lambda: conv.GatedGraphConv(C, 2)),
    Case("ResGatedGraphConv", lambda: conv.ResGatedGraphConv(C, C)),
    Case("ResGatedGraphConv [edge features]", lambda: conv.ResGatedGraphConv(C, C, edge_dim=D), EDGES, FEATURES),
    Case("GATConv", lambda: conv.GATConv(C, H, heads=2)),
    Case("GATConv [edge features]", lambda: conv.GATConv(C, H, heads=2, edge_dim=D, concat=False), EDGES, FEATURES),
    Case("GATConv [residual]", lambda: conv.GATConv(C, H, heads=2, residual=True)),
    Absent("CuGraphGATConv", "needs pylibcugraphops"),
    Absent("FusedGATConv", "needs dgNN, and a GPU"),
    Case("GATv2Conv", lambda: conv.GATv2Conv(C, H, heads=2)),
    Case("GATv2Conv [edge features]", lambda: conv.GATv2Conv(C, H, heads=2, edge_dim=D), EDGES, FEATURES),
    Case("TransformerConv", lambda: conv.TransformerConv(C, H, heads=2, beta=True)),
    Case("TransformerConv [edge features]", lambda: conv.TransformerConv(C, H, heads=2, edge_dim=D), EDGES, FEATURES),
    Case("AGNNConv", conv.AGNNConv),
    Case("TAGConv", lambda: conv.TAGConv(C, C)),
    Case("GINConv", lambda: conv.GINConv(mlp(C, C), train_eps=True)),
    Case("GINEConv", lambda: conv.GINEConv(mlp(C, C), edge_dim=D), EDGES, FEATURES),
    Case("ARMAConv", lambda: conv.ARMAConv(C, C, num_stacks=2, num_layers=2)),
    Case("SGConv", lambda: conv.SGConv(C, C, K=2)),
    Case("SSGConv", lambda: conv.SSGConv(C, C, alpha=0.1, K=2)),
    Case("APPNP", lambda: conv.APPNP(K=2, alpha=0.1)),
    Case("MFConv", lambda: conv.MFConv(C, C, max_degree=4)),
    Case("RGCNConv", lambda: conv.RGCNConv(C, C, TYPES), (*EDGES, "edge_type")),
    Case("RGCNConv [bases]", lambda: conv.RGCNConv(C, C, TYPES, num_bases=2), (*EDGES, "edge_type")),
    Case("RGCNConv [blocks]", lambda: conv.RGCNConv(C, C, TYPES, num_blocks=2), (*EDGES, "edge_type")),
    Case("FastRGCNConv", lambda: conv.FastRGCNConv(C, C, TYPES), (*EDGES, "edge_type")),
    Absent("CuGraphRGCNConv", "needs pylibcugraphops"),
    Case("RGATConv", lambda: conv.RGATConv(C, H, TYPES, heads=2), (*EDGES, "edge_type")),
    Case("SignedConv", lambda: conv.SignedConv(C, C, first_aggr=True), (*EDGES, "other_edge_index")),
    Case("DNAConv", lambda: conv.DNAConv(C, heads=2), ("x_history", "edge_index")),
    Case("PointNetConv", lambda: conv.PointNetConv(mlp(C + 3, C), mlp(C, C)), ("x", "pos", "edge_index")),
    Case("GMMConv", lambda: conv.GMMConv(C, C, dim=D, kernel_size=2), EDGES, FEATURES),
    Absent("SplineConv", "needs torch-spline-conv"),
    Case("NNConv", lambda: conv.NNConv(C, C, mlp(D, C * C)), EDGES, FEATURES),
    Case("CGConv", lambda: conv.CGConv(C, dim=D), EDGES, FEATURES),
    Case("EdgeConv", lambda: conv.EdgeConv(mlp(2 * C, C))),
    Absent("DynamicEdgeConv", "needs torch-cluster for its neighbours"),
    Absent("XConv", "needs torch-cluster for its neighbours"),
    Case("PPFConv", lambda: conv.PPFConv(mlp(C + 4, C), mlp(C, C)), ("x", "pos", "normals", "edge_index")),
    Case("FeaStConv", lambda: conv.FeaStConv(C, C, heads=2)),
    Case("PointTransformerConv", lambda: conv.PointTransformerConv(C, C), ("x", "pos", "edge_index")),
    Case("HypergraphConv", lambda: conv.HypergraphConv(C, C)),
    Case(
        "HypergraphConv [attention]",
        lambda: conv.HypergraphConv(C, H, use_attention=True, heads=2),
        EDGES,
        {"hyperedge_attr": "x0"},
    ),
    Case("LEConv", lambda: conv.LEConv(C, C), WEIGHTED),
    Case(
        "PNAConv",
        lambda: conv.PNAConv(
            C, C, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], degrees(), edge_dim=D
        ),
        EDGES,
        FEATURES,
    ),
    Case("ClusterGCNConv", lambda: conv.ClusterGCNConv(C, C)),
    Case("GENConv", lambda: conv.GENConv(C, C, learn_t=True, edge_dim=D), EDGES, FEATURES),
    Case("GENConv [power mean]", lambda: conv.GENConv(C, C, aggr="powermean", learn_p=True)),
    Case("GCN2Conv", lambda: conv.GCN2Conv(C, alpha=0.1, theta=0.5, layer=1), ("x", "x0", "edge_index")),
    Absent("PANConv", "needs torch-sparse"),
    Case(
        "WLConv",
        conv.WLConv,
        ("node_type", "edge_index"),
        asks=1,
        asks_for="colours, which Python hashes and the layer keeps in a table of Python's",
    ),
    Case("WLConvContinuous", conv.WLConvContinuous, WEIGHTED),
    Case("FiLMConv", lambda: conv.FiLMConv(C, C, num_relations=TYPES), (*EDGES, "edge_type")),
    Case("SuperGATConv", lambda: conv.SuperGATConv(C, H, heads=2).eval()),
    Case("FAConv", lambda: conv.FAConv(C), ("x", "x0", "edge_index")),
    Case("EGConv", lambda: conv.EGConv(C, C, ["symnorm", "max", "std"], num_heads=2, num_bases=2)),
    Case("PDNConv", lambda: conv.PDNConv(C, C, edge_dim=D, hidden_channels=4), EDGES, FEATURES),
    Case("GeneralConv", lambda: conv.GeneralConv(C, C, in_edge_channels=D, attention=True), EDGES, FEATURES),
    Case("HGTConv", lambda: conv.HGTConv(C, C, _METADATA, heads=2), (_typed_nodes, _typed_edges)),
    Case(
        "HEATConv",
        lambda: conv.HEATConv(C, H, 2, TYPES, 2, D, 2, heads=2),
        (*EDGES, "node_type", "edge_type", "edge_attr"),
    ),
    Case(
        "HeteroConv",
        lambda: conv.HeteroConv({e: conv.SAGEConv((C, C), C) for e in _METADATA[1]}),
        (_typed_nodes, _typed_edges),
    ),
    Case("HANConv", lambda: conv.HANConv(C, C, _METADATA, heads=2), (_typed_nodes, _typed_edges)),
    Case("LGConv", conv.LGConv),
    Case(
        "PointGNNConv",
        lambda: conv.PointGNNConv(mlp(C, 3), mlp(C + 3, C), mlp(C, C)),
        ("x", "pos", "edge_index"),
    ),
    Case("GPSConv", lambda: conv.GPSConv(C, conv.GCNConv(C, C), heads=2), EDGES, {"batch": "batch"}),
    Case(
        "GPSConv [performer]",
        lambda: conv.GPSConv(C, conv.GCNConv(C, C), heads=2, attn_type="performer"),
        EDGES,
        {"batch": "batch"},
    ),
    Case("AntiSymmetricConv", lambda: conv.AntiSymmetricConv(C)),
    Case("DirGNNConv", lambda: conv.DirGNNConv(conv.SAGEConv(C, C))),
    Case("MixHopConv", lambda: conv.MixHopConv(C, C)),
    Case("MeshCNNConv", lambda: conv.MeshCNNConv(C, C), ("x", _neighbours)),
)
