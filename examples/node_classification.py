"""Node classification, full batch: the GCN of PyG's guide to compiled models, with one line changed.

    python examples/node_classification.py                      Cora if it is in data/, or handwritten digits
    python examples/node_classification.py --dataset PubMed --download

PyG's guide normalises the edges beforehand and turns the layers' own normalisation off, as removing self loops would
break the graph. Here nothing is done beforehand: the layers are as they are.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from digits import data as digits
from torch_geometric import seed_everything
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCNConv

import gnncompile


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, dropout=0.5):
        super().__init__()
        self.dropout = dropout
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.conv2(x, edge_index)


def load(args):
    dataset = common.load(args, Planetoid, "Planetoid", name=args.dataset, transform=T.NormalizeFeatures())
    if dataset is None:
        return digits.images_as_nodes(), digits.NUM_CLASSES
    data = dataset[0]
    data.train_index, data.test_index = data.train_mask.nonzero().view(-1), data.test_mask.nonzero().view(-1)
    return data, dataset.num_classes


def fit(model, data, args, steps):
    seed_everything(args.seed)
    optimizer = torch.optim.Adam(
        [
            dict(params=model.conv1.parameters(), weight_decay=5e-4),
            dict(params=model.conv2.parameters(), weight_decay=0),
        ],
        lr=args.lr,
    )

    def train():
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_index], data.y[data.train_index])
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        steps(train)
    return test(model, data)


@torch.no_grad()
def test(model, data):
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    return float((pred[data.test_index] == data.y[data.test_index]).float().mean())


def main():
    parser = common.parser(__doc__, hidden_channels=16, dropout=0.5, lr=0.01, epochs=200)
    common.add_dataset(parser, ["Cora", "CiteSeer", "PubMed"], "digits")
    args = common.parse(parser, epochs=100, dropout=0.0)
    data, num_classes = load(args)
    data = data.to(args.device)

    eager = GCN(data.num_features, args.hidden_channels, num_classes, args.dropout).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))  # the one line

    # Without dropout, of which each way draws its own.
    common.check(eager.eval(), model.eval(), lambda m: F.cross_entropy(m(data.x, data.edge_index), data.y))
    status = common.compare(
        {
            "eager": lambda steps: fit(eager, data, args, steps),
            "gnncompile": lambda steps: fit(model, data, args, steps),
        },
        args.device,
        "test accuracy",
        within=0.05,
    )
    report = gnncompile.explain(model, data.x, data.edge_index)
    print(f"Graph breaks: {report.graph_breaks}, recompiles: {report.recompiles}, regions: {len(report.regions)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
