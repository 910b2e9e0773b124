"""Point clouds: EdgeConv on the k nearest neighbours of each point tells shapes apart.

    python examples/point_clouds.py                             ModelNet10 if it is in data/, or generated shapes
    python examples/point_clouds.py --k 20 --num_points 512

EdgeConv's first linear layer is taken off the edges: it runs once per point instead of once per edge. PyG's k-NN needs
pyg-lib; clouds are small enough for all distances, so that a few lines of torch do.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.datasets import ModelNet
from torch_geometric.loader import DataLoader
from torch_geometric.nn import EdgeConv, global_max_pool
from torch_geometric.transforms import BaseTransform

import gnncompile

SHAPES = ("sphere", "cube", "cylinder", "cone", "torus")


class NearestNeighbours(BaseTransform):
    """Edges from the `k` nearest points to each point, as ``T.KNNGraph`` has them."""

    def __init__(self, k):
        self.k = k

    def forward(self, data):
        nearest = torch.cdist(data.pos, data.pos).fill_diagonal_(float("inf")).topk(self.k, largest=False).indices
        centre = torch.arange(len(data.pos)).repeat_interleave(self.k)
        data.edge_index = torch.stack([nearest.view(-1), centre])
        return data


class Net(torch.nn.Module):
    def __init__(self, hidden_channels, out_channels, aggr="max"):
        super().__init__()
        mlps = [
            torch.nn.Sequential(
                torch.nn.Linear(2 * width, hidden_channels),
                torch.nn.ReLU(),
                torch.nn.Linear(hidden_channels, hidden_channels),
            )
            for width in (3, hidden_channels)
        ]
        self.conv1, self.conv2 = EdgeConv(mlps[0], aggr), EdgeConv(mlps[1], aggr)
        self.lin = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, pos, edge_index, batch):
        x = self.conv1(pos, edge_index)
        x = self.conv2(x, edge_index)
        return self.lin(global_max_pool(x, batch))


def shape(kind, num_points, generator):
    """Points on a surface, turned at random."""
    u, v, w = torch.rand(3, num_points, generator=generator)
    angle, height = 2 * torch.pi * u, 2 * v - 1
    round_ = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(u)], dim=1)
    up = torch.tensor([0.0, 0.0, 1.0]) * height[:, None]
    if kind == "sphere":
        pos = round_ * (1 - height**2).sqrt()[:, None] + up
    elif kind == "cube":
        pos = 2 * torch.rand(num_points, 3, generator=generator) - 1
        pos = pos / pos.abs().max(dim=1, keepdim=True).values
    elif kind == "cylinder":
        pos = round_ * 0.6 + up
    elif kind == "cone":
        pos = round_ * (0.5 * (1 - height))[:, None] + up
    else:
        tube = 2 * torch.pi * w
        pos = round_ * (0.7 + 0.3 * tube.cos())[:, None] + torch.tensor([0.0, 0.0, 0.3]) * tube.sin()[:, None]
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
    return Data(pos=pos @ turn + 0.02 * torch.randn(num_points, 3, generator=generator))


def load(args):
    """Clouds to train and to test on, and the number of classes."""
    near = NearestNeighbours(args.k)
    sample = T.Compose([T.SamplePoints(args.num_points), near])
    known = dict(name=args.dataset.removeprefix("ModelNet"), transform=sample, pre_transform=T.NormalizeScale())
    dataset = common.load(args, ModelNet, args.dataset, train=True, **known)
    if dataset is not None:
        test = common.load(args, ModelNet, args.dataset, train=False, **known)
        return list(dataset), list(test), dataset.num_classes
    generator = torch.Generator().manual_seed(args.seed)
    graphs = []
    for number in range(args.num_clouds):
        kind = number % len(SHAPES)
        graphs.append(near(shape(SHAPES[kind], args.num_points, generator)))
        graphs[-1].y = torch.tensor([kind])
    return graphs[: len(graphs) // 2], graphs[len(graphs) // 2 :], len(SHAPES)


def fit(model, graphs, test_graphs, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)

    def train(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.pos, data.edge_index, data.batch), data.y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        for data in DataLoader(graphs, args.batch_size, shuffle=True, generator=order):
            steps(train, data.to(args.device))
    right = 0
    with torch.no_grad():
        for data in DataLoader(test_graphs, args.batch_size):
            data = data.to(args.device)
            right += int((model(data.pos, data.edge_index, data.batch).argmax(dim=-1) == data.y).sum())
    return right / len(test_graphs)


def main():
    parser = common.parser(
        __doc__, hidden_channels=64, lr=0.005, epochs=20, batch_size=20, k=10, num_points=128, num_clouds=400
    )
    common.add_dataset(parser, ["ModelNet10", "ModelNet40"], "shapes")
    args = common.parse(parser, epochs=8, hidden_channels=32, num_clouds=200, num_points=96)
    graphs, test_graphs, num_classes = load(args)

    eager = Net(args.hidden_channels, num_classes).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))

    data = next(iter(DataLoader(graphs, args.batch_size))).to(args.device)
    common.check(eager, model, lambda m: F.cross_entropy(m(data.pos, data.edge_index, data.batch), data.y))
    return common.compare(
        {
            "eager": lambda steps: fit(eager, graphs, test_graphs, args, steps),
            "gnncompile": lambda steps: fit(model, graphs, test_graphs, args, steps),
        },
        args.device,
        "test accuracy",
        within=0.1,
    )


if __name__ == "__main__":
    sys.exit(main())
