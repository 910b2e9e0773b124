"""Explaining a compiled model: PyG's ``Explainer`` takes it as it takes any other, and finds the same masks.

    python examples/explain.py                                  houses in a random graph, found by GNNExplainer

Nodes are labelled by their place in a house of five nodes, so the edges of its house are why a node has its label. The
model is trained compiled. While an explainer masks messages its calls run uncompiled, as PyG wrote them, and a warning
says so; the calls around it stay compiled.
"""

import sys

import common
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch_geometric import seed_everything
from torch_geometric.datasets import ExplainerDataset
from torch_geometric.datasets.graph_generator import BAGraph
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn.models import GCN
from torch_geometric.utils import k_hop_subgraph

import gnncompile

CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}


def houses(num_houses):
    """Returns a random graph to which houses are attached; its `edge_mask` is 1 for the edges of houses."""
    data = ExplainerDataset(BAGraph(num_nodes=300, num_edges=5), "house", num_motifs=num_houses)[0]
    data.x = torch.ones(data.num_nodes, 10)
    return data


def train(model, data, args):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out, data.y).backward()
        optimizer.step()
    return float((out.argmax(dim=-1) == data.y).float().mean())


def explain(model, data, nodes, args):
    """Returns the mask of edges for each node, and the mean area under the curve (AUC) of its own neighbourhood."""
    explainer = Explainer(
        model=model,
        algorithm=GNNExplainer(epochs=args.explainer_epochs),
        explanation_type="model",
        model_config=CONFIG,
        edge_mask_type="object",
    )
    masks, areas = [], []
    for node in nodes:
        seed_everything(args.seed)
        mask = explainer(data.x, data.edge_index, index=node).edge_mask
        _, _, _, near = k_hop_subgraph(node, 3, data.edge_index)
        areas.append(roc_auc_score(data.edge_mask[near].cpu(), mask[near].cpu()))
        masks.append(mask)
    return torch.stack(masks), sum(areas) / len(areas)


def main():
    parser = common.parser(__doc__, hidden_channels=20, lr=0.01, epochs=300, houses=80, explained=10)
    parser.add_argument("--explainer_epochs", type=int, default=200, help="default: %(default)s")
    args = common.parse(parser, epochs=150, houses=20, explained=2, explainer_epochs=30)
    data = houses(args.houses).to(args.device)

    eager = GCN(data.num_features, args.hidden_channels, num_layers=3, out_channels=4).to(args.device)
    model = gnncompile.compile(eager)  # shares all weights with the original
    print(f"Trained: accuracy {train(model, data, args):.4f}.")

    nodes = data.node_mask.nonzero().view(-1)[:: 5 * args.houses // args.explained][: args.explained].tolist()
    (masks, area), (expected, _) = (explain(each, data, nodes, args) for each in (model, eager))
    apart = float((masks - expected).abs().max())
    print(f"Explained {len(nodes)} nodes: their houses are found with an AUC of {area:.3f}.")
    agree = apart <= 1e-3
    print(f"{'All agree' if agree else 'PROBLEM'}: masks differ by {apart:.0e} from those of the original model.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
