"""A layer of your own: ``MessagePassing`` with a message that no layer of PyG has, fused as PyG's own are.

    python examples/custom_message_passing.py                   Cora if it is in data/, or handwritten digits

Nothing is registered and nothing rewritten: write `message` with torch's functions. At the end is what the compiler
made of it, with the line of this file that each kernel came from.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from digits import data as digits
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import MessagePassing

import gnncompile


class NearnessConv(MessagePassing):
    r"""A sum over neighbours, each gated by how near it is in a learned space.

    .. math:: x_i' = W x_i + \sum_j \exp(-\gamma \lVert P x_i - P x_j \rVert^2) \tanh(V x_j)
    """

    def __init__(self, in_channels, out_channels, place_channels=8):
        super().__init__(aggr="mean")
        self.place = torch.nn.Linear(in_channels, place_channels, bias=False)
        self.value = torch.nn.Linear(in_channels, out_channels)
        self.own = torch.nn.Linear(in_channels, out_channels)
        self.gamma = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, edge_index):
        return self.own(x) + self.propagate(edge_index, place=self.place(x), value=self.value(x))

    def message(self, place_i, place_j, value_j):
        apart = (place_i - place_j).square().sum(dim=-1, keepdim=True)
        return torch.exp(-self.gamma * apart) * value_j.tanh()


class Net(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = NearnessConv(in_channels, hidden_channels)
        self.conv2 = NearnessConv(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def load(args):
    dataset = common.load(args, Planetoid, "Planetoid", name=args.dataset, transform=T.NormalizeFeatures())
    if dataset is None:
        return digits.images_as_nodes(), digits.NUM_CLASSES
    data = dataset[0]
    data.train_index, data.test_index = data.train_mask.nonzero().view(-1), data.test_mask.nonzero().view(-1)
    return data, dataset.num_classes


def fit(model, data, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    def train():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_index], data.y[data.train_index])
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        steps(train)
    with torch.no_grad():
        pred = model(data.x, data.edge_index).argmax(dim=-1)
    return float((pred[data.test_index] == data.y[data.test_index]).float().mean())


def main():
    parser = common.parser(__doc__, hidden_channels=64, lr=0.01, epochs=100)
    common.add_dataset(parser, ["Cora", "CiteSeer", "PubMed"], "digits")
    args = common.parse(parser, epochs=40)
    data, num_classes = load(args)
    data = data.to(args.device)

    eager = Net(data.num_features, args.hidden_channels, num_classes).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))

    common.check(eager, model, lambda m: F.cross_entropy(m(data.x, data.edge_index), data.y))
    status = common.compare(
        {
            "eager": lambda steps: fit(eager, data, args, steps),
            "gnncompile": lambda steps: fit(model, data, args, steps),
        },
        args.device,
        "test accuracy",
        within=0.03,
    )
    print(f"\n{gnncompile.explain(model, data.x, data.edge_index)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
