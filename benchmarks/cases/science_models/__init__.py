"""Models of meshes, molecules and materials as their authors write them: layers and states on the edges.

Each is a stack of equal layers without an encoder and a decoder. All of them work on tensors; none has a loop over
edges. `forward` gives one tensor, with a row per node.
"""

from benchmarks.cases.science_models.edge_states import DMPNN, NUM_RELATIONS, GatedGCN, RelationalConvolution
from benchmarks.cases.science_models.meshes import CheckpointedProcessor, GraphCast, Processor
from benchmarks.cases.science_models.molecules import EGNN, PaiNN, SchNet
from benchmarks.cases.science_models.stacked import cgcnn, edge_conv, nn_conv, point_transformer
from benchmarks.cases.science_models.tensors import MACE, TensorNet
from benchmarks.cases.science_models.triplets import ALIGNN, DimeNetPlusPlus, triplets

__all__ = [
    "ALIGNN",
    "DMPNN",
    "EGNN",
    "MACE",
    "NUM_RELATIONS",
    "CheckpointedProcessor",
    "DimeNetPlusPlus",
    "GatedGCN",
    "GraphCast",
    "PaiNN",
    "Processor",
    "RelationalConvolution",
    "SchNet",
    "TensorNet",
    "cgcnn",
    "edge_conv",
    "nn_conv",
    "point_transformer",
    "triplets",
]
