"""Graph classification, mini-batches: the GIN of PyG's guide to compiled models, with one line changed.

    python examples/graph_classification.py                     MUTAG if it is in data/, or handwritten digits
    python examples/graph_classification.py --dataset PROTEINS --download

PyG's guide passes the number of graphs to the pooling, and has ``dynamic=True``, as every mini-batch has sizes of its
own. Here `global_add_pool` is not told a size, and one compiled graph serves all.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
from digits import data as digits
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, global_add_pool

import gnncompile


class GIN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers, dropout=0.5):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            self.convs.append(GINConv(MLP([in_channels, hidden_channels, hidden_channels]), train_eps=False))
            in_channels = hidden_channels
        self.mlp = MLP([hidden_channels, hidden_channels, out_channels], norm=None, dropout=dropout)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        x = global_add_pool(x, batch)
        return self.mlp(x)


def load(args):
    dataset = common.load(args, TUDataset, "TUDataset", name=args.dataset)
    if dataset is None:
        return *digits.images_as_graphs(), digits.NUM_CLASSES
    dataset, num_classes = dataset.shuffle(), dataset.num_classes
    return dataset[len(dataset) // 10 :], dataset[: len(dataset) // 10], num_classes


def fit(model, graphs, test_graphs, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(graphs, args.batch_size, shuffle=True, generator=order)

    def train(data):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        for data in train_loader:
            steps(train, data.to(args.device))
    return test(model, DataLoader(test_graphs, args.batch_size), args.device)


@torch.no_grad()
def test(model, loader, device):
    model.eval()
    right = total = 0
    for data in loader:
        data = data.to(device)
        pred = model(data.x, data.edge_index, data.batch).argmax(dim=-1)
        right, total = right + int((pred == data.y).sum()), total + data.num_graphs
    return right / total


def main():
    parser = common.parser(__doc__, hidden_channels=32, num_layers=5, dropout=0.5, lr=0.01, epochs=50, batch_size=128)
    common.add_dataset(parser, ["MUTAG", "PROTEINS", "ENZYMES"], "digits")
    # With a higher rate the test accuracy of so few epochs is a matter of rounding.
    args = common.parse(parser, epochs=20, num_layers=2, dropout=0.0, lr=0.003)
    graphs, test_graphs, num_classes = load(args)

    eager = GIN(graphs[0].num_features, args.hidden_channels, num_classes, args.num_layers, args.dropout)
    eager = eager.to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))  # the one line

    data = next(iter(DataLoader(graphs, args.batch_size))).to(args.device)
    common.check(eager.eval(), model.eval(), lambda m: F.cross_entropy(m(data.x, data.edge_index, data.batch), data.y))
    status = common.compare(
        {
            "eager": lambda steps: fit(eager, graphs, test_graphs, args, steps),
            "gnncompile": lambda steps: fit(model, graphs, test_graphs, args, steps),
        },
        args.device,
        "test accuracy",
        within=0.1,
    )
    report = gnncompile.explain(model, data.x, data.edge_index, data.batch)
    print(f"Graph breaks: {report.graph_breaks}, recompiles: {report.recompiles}, regions: {len(report.regions)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
