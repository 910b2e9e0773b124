"""Cases for ``torch_geometric.nn.models``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv, models

from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import EDGE_CHANNELS as D
from gnncompile.support.case import Absent, Argument, Case, Graph, degrees
from gnncompile.support.conv import mlp

EDGES: tuple[Argument, ...] = ("x", "edge_index")
SEARCH = "needs torch-cluster for its neighbours"
WALKS = "needs torch-cluster or pyg-lib for its walks"


class _Encoder(nn.Module):
    """An encoder of a variational autoencoder: one convolution for the mean, one for the deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = GCNConv(C, C), GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x, edge_index), self.deviation(x, edge_index)


class _Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(3 * C + D, D)

    def forward(self, src: Tensor, dst: Tensor, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Any:
        return self.mlp(torch.cat([src, dst, edge_attr, u[batch]], dim=1))


class _Nodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(2 * C + D, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Any:
        message = torch.cat([x[edge_index[0]], edge_attr], dim=1)
        total = message.new_zeros(x.size(0), C + D).index_add(0, edge_index[1], message)
        return self.mlp(torch.cat([x, total], dim=1))


def _complete(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all pairs of atoms and their distances, in place of the pairs within a radius."""
    n = pos.size(0)
    source = torch.arange(n).repeat_interleave(n)
    target = torch.arange(n).repeat(n)
    return torch.stack([source, target]), (pos[source] - pos[target] + 0.1).norm(dim=1)


def _corruption(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    return x.flip(0), edge_index


def _summary(z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return z.mean(dim=0).sigmoid()


def _layers(graph: Graph) -> list[Tensor]:
    return [graph.x, graph.x0]


def _typed_layers(graph: Graph) -> dict[str, list[Tensor]]:
    return {"a": [graph.x, graph.x0], "b": [graph.x0, graph.x]}


def _global(graph: Graph) -> Tensor:
    return graph.normal(3, C, seed=30)


def _targets(graph: Graph) -> Data:
    data = graph.data
    data.y, data.y_graph = graph.normal(graph.nodes, 5, seed=32), graph.normal(3, 2, seed=33)
    return data


def _mask(graph: Graph) -> Tensor:
    return torch.arange(graph.nodes) % 2 == 0


def _basic(name: str, **kwargs: Any) -> Case:
    return Case(name, lambda: getattr(models, name)(C, C, 2, C, **kwargs))


MODELS: tuple[Case | Absent, ...] = (
    Case("MLP", lambda: models.MLP([C, C, C], norm=None), ("x",)),
    Case("MLP [graph norm]", lambda: models.MLP([C, C, C], norm="graph_norm"), ("x", "batch")),
    _basic("GCN"),
    _basic("GraphSAGE"),
    _basic("GIN"),
    _basic("GAT"),
    _basic("PNA", aggregators=["mean", "max"], scalers=["identity", "amplification"], deg=degrees()),
    _basic("EdgeCNN"),
    Case("GCN [jumping knowledge]", lambda: models.GCN(C, C, 3, C, jk="lstm", norm="layer_norm")),
    Case("JumpingKnowledge", lambda: models.JumpingKnowledge("max"), (_layers,)),
    Case("JumpingKnowledge [lstm]", lambda: models.JumpingKnowledge("lstm", C, 2), (_layers,)),
    Case("HeteroJumpingKnowledge", lambda: models.HeteroJumpingKnowledge(["a", "b"], "lstm", C, 2), (_typed_layers,)),
    Case(
        "MetaLayer",
        lambda: models.MetaLayer(_Edges(), _Nodes()),
        ("x", "batch_edge_index", "edge_attr", _global, "batch"),
    ),
    Absent("Node2Vec", WALKS),
    Case("DeepGraphInfomax", lambda: models.DeepGraphInfomax(C, GCNConv(C, C), _summary, _corruption)),
    Case("InnerProductDecoder", models.InnerProductDecoder),
    Case("GAE", lambda: models.GAE(GCNConv(C, C))),
    Case("VGAE", lambda: models.VGAE(_Encoder())),
    Case("ARGA", lambda: models.ARGA(GCNConv(C, C), nn.Linear(C, 1))),
    Case("ARGVA", lambda: models.ARGVA(_Encoder(), nn.Linear(C, 1))),
    Case("SignedGCN", lambda: models.SignedGCN(C, C, 2), (*EDGES, "other_edge_index")),
    Absent("RENet", "reads a history that its own data set makes"),
    Case(
        "GraphUNet",
        lambda: models.GraphUNet(C, C, C, 2),
        ("x", "batch_edge_index", "batch"),
        asks=4,
        asks_for="how many edges are left by two poolings, how many meet between these, and at how many places",
    ),
    Case(
        "GraphUNet [weights]",
        lambda: models.GraphUNet(C, C, C, 1, sum_res=False),
        ("x", "edge_index", "batch", "edge_weight"),
        asks=1,
        asks_for="how many edges are left between the nodes that are kept",
    ),
    Case(
        "SchNet",
        lambda: models.SchNet(C, C, 2, 5, interaction_graph=_complete),
        ("z", "pos", "batch"),
    ),
    Absent("DimeNet", SEARCH),
    Absent("DimeNetPlusPlus", SEARCH),
    Case(
        "GPSE",
        lambda: models.GPSE(
            C,
            5,
            C,
            layers_mp=2,
            layers_post_mp=1,
            multi_head_dim_inner=C,
            num_node_targets=5,
            num_graph_targets=2,
            dropout=0.0,
        ),
        (_targets,),
    ),
    Case(
        "GPSENodeEncoder",
        lambda: models.GPSENodeEncoder(2 * C, C, C, C, dropout_be=0, dropout_ae=0),
        ("x", "x0"),
    ),
    Absent("to_captum_model", "an explanation's wrapper, no layer"),
    Absent("to_captum_input", "an explanation's wrapper, no layer"),
    Absent("captum_output_to_dicts", "an explanation's wrapper, no layer"),
    Absent("MetaPath2Vec", WALKS),
    Case("DeepGCNLayer", lambda: models.DeepGCNLayer(GCNConv(C, C), nn.LayerNorm(C), nn.ReLU())),
    Absent("TGNMemory", "keeps a memory that every call writes to"),
    Case("LabelPropagation", lambda: models.LabelPropagation(2, 0.9), EDGES),
    Absent("CorrectAndSmooth", "post-processing of labels, without parameters"),
    Case(
        "AttentiveFP",
        lambda: models.AttentiveFP(C, C, C, D, 2, 2),
        ("x", "batch_edge_index", "edge_attr", "batch"),
    ),
    Case("RECT_L", lambda: models.RECT_L(C, C)),
    Case("LINKX", lambda: models.LINKX(30, C, C, C, 2), (lambda g: g.normal(30, C, seed=31), "edge_index")),
    Case("LightGCN", lambda: models.LightGCN(30, C, 2), ("edge_index",)),
    Case("MaskLabel", lambda: models.MaskLabel(9, C), ("x", lambda g: g.z - 1, _mask)),
    Case("GroupAddRev", lambda: models.GroupAddRev(SAGEConv(C // 2, C // 2), num_groups=2)),
    Absent("GNNFF", SEARCH),
    Case("PMLP", lambda: models.PMLP(C, C, C, 2, norm=False).eval()),
    Case("NeuralFingerprint", lambda: models.NeuralFingerprint(C, C, C, 2), ("x", "batch_edge_index", "batch")),
    Absent("ViSNet", SEARCH),
    Absent("LPFormer", "needs a sparse matrix of personalised PageRank of its own"),
    Case("SGFormer", lambda: models.SGFormer(C, C, C).eval(), (*EDGES, "batch"), dtype=torch.float32),
    Case("Polynormer", lambda: models.Polynormer(C, C, C, local_layers=2).eval(), (*EDGES, "batch")),
    Case("ARLinkPredictor", lambda: models.ARLinkPredictor(C, C)),
)
