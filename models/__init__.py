"""Reference GNNs to copy from, installed as `gnncompile.models`.

Each file is one model in the form that compiles well, with or without gnncompile: tensors in, tensors out; sizes taken
from the arguments, never from the data (`index.max()`); no branch on a tensor's values. What a PyG layer does inside
(GCN's and GAT's self loops) stays in the layer: gnncompile makes it free of synchronisation.

`GCN`, `GraphSAGE`, `GAT`, `GATv2` (PyG's `GAT(v2=True)`), `PNA` and `EdgeCNN` hold the same `state_dict` keys as
`torch_geometric.nn.models`, `GIN` the same for its convolutions and `DeepGCN` for its `DeepGCNLayer`s, so that weights
move both ways. `Readout` makes rows of graphs of the rows of nodes.
"""

from .deep_gcn import DeepGCN
from .edge_cnn import EdgeCNN
from .gat import GAT
from .gat_v2 import GATv2
from .gcn import GCN
from .gin import GIN
from .graph_sage import GraphSAGE
from .graph_transformer import GraphTransformer
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
    "Readout",
]
