"""Reference GNNs to copy from, installed as `gnncompile.models`.

Each file is one model in a form that compiles well, with or without gnncompile: tensors in, tensors out; sizes come
from the arguments, never from the data (`index.max()`); no branch depends on a tensor's values. Work inside PyG's
layers (the self loops of GCN and GAT) stays there: gnncompile runs it without synchronisation.

`GCN`, `GraphSAGE`, `GAT`, `GATv2` (PyG's `GAT(v2=True)`), `PNA` and `EdgeCNN` have the same `state_dict` keys as
`torch_geometric.nn.models`, so that weights move both ways. The same holds for the convolutions of `GIN` and the
`DeepGCNLayer`s of `DeepGCN`. `MeshGraphNet` keeps a state on every edge. `PaiNN` has forces,
which are a gradient that `forward` takes. `Readout` reduces the rows of each graph's
nodes to one row.
"""

from .deep_gcn import DeepGCN
from .edge_cnn import EdgeCNN
from .gat import GAT
from .gat_v2 import GATv2
from .gcn import GCN
from .gin import GIN
from .graph_sage import GraphSAGE
from .graph_transformer import GraphTransformer
from .mesh_graph_net import MeshGraphNet
from .painn import PaiNN
from .pna import PNA
from .readout import Readout
from .rgcn import RGCN

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "PNA",
    "RGCN",
    "DeepGCN",
    "EdgeCNN",
    "GATv2",
    "GraphSAGE",
    "GraphTransformer",
    "MeshGraphNet",
    "PaiNN",
    "Readout",
]
