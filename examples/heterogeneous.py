"""Heterogeneous graphs: a convolution per type of edges (``HeteroConv``), in one compiled graph.

    python examples/heterogeneous.py                            DBLP if it is in data/DBLP, or digits: images and pixels
    python examples/heterogeneous.py --dataset DBLP --download

The model takes PyG's dicts. Each type of edges becomes one fused kernel, and the layers' Python loops are gone.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from digits import data as digits
from torch_geometric.datasets import DBLP
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

import gnncompile


class HeteroGNN(torch.nn.Module):
    def __init__(self, data, target, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.target = target
        self.lins = torch.nn.ModuleDict({k: Linear(x.size(-1), hidden_channels) for k, x in data.x_dict.items()})
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            convs = {edge_type: SAGEConv(hidden_channels, hidden_channels) for edge_type in data.edge_types}
            self.convs.append(HeteroConv(convs, aggr="sum"))
        self.lin = Linear(hidden_channels, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {key: self.lins[key](x).relu() for key, x in x_dict.items()}
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
        return self.lin(x_dict[self.target])


def load(args):
    """A graph, the type of the nodes to be classified, and the number of classes."""
    dataset = common.load(args, DBLP, "DBLP", transform=T.Constant(node_types="conference"))
    if dataset is None:
        return digits.images_and_pixels(), "image", digits.NUM_CLASSES
    data = dataset[0]
    nodes = data["author"]
    nodes.train_index, nodes.test_index = nodes.train_mask.nonzero().view(-1), nodes.test_mask.nonzero().view(-1)
    return data, "author", int(nodes.y.max()) + 1


def fit(model, data, nodes, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-4)

    def train():
        model.train()
        optimizer.zero_grad()
        out = model(data.x_dict, data.edge_index_dict)
        loss = F.cross_entropy(out[nodes.train_index], nodes.y[nodes.train_index])
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        steps(train)
    return test(model, data, nodes)


@torch.no_grad()
def test(model, data, nodes):
    model.eval()
    pred = model(data.x_dict, data.edge_index_dict).argmax(dim=-1)
    return float((pred[nodes.test_index] == nodes.y[nodes.test_index]).float().mean())


def main():
    parser = common.parser(__doc__, hidden_channels=64, num_layers=2, lr=0.01, epochs=100)
    common.add_dataset(parser, ["DBLP"], "digits")
    args = common.parse(parser, epochs=40, hidden_channels=32)
    data, target, num_classes = load(args)
    data = data.to(args.device)
    nodes = data[target]

    eager = HeteroGNN(data, target, args.hidden_channels, num_classes, args.num_layers).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))

    common.check(eager, model, lambda m: F.cross_entropy(m(data.x_dict, data.edge_index_dict), nodes.y.clamp(min=0)))
    return common.compare(
        {
            "eager": lambda steps: fit(eager, data, nodes, args, steps),
            "gnncompile": lambda steps: fit(model, data, nodes, args, steps),
        },
        args.device,
        "test accuracy",
        within=0.03,
    )


if __name__ == "__main__":
    sys.exit(main())
