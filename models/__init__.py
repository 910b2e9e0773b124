"""Reference GNNs to copy from, installed as `gnncompile.models`.

Each file is one model in the form that compiles well, with or without gnncompile: tensors in, tensors out; sizes taken
from the arguments, never from the data (`index.max()`); no branch on a tensor's values. What a PyG layer does inside
(GCN's and GAT's self loops) stays in the layer: gnncompile makes it free of synchronisation.

`GCN`, `GraphSAGE` and `GAT` hold the same `state_dict` keys as `torch_geometric.nn.models`, `GIN` the same for its
convolutions, so that weights move both ways.
"""

from .gat import GAT
from .gcn import GCN
from .gin import GIN
from .graph_sage import GraphSAGE

__all__ = ["GAT", "GCN", "GIN", "GraphSAGE"]
