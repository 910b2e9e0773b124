"""``TrainStep``: forward, loss, backward, clipping, optimizer and schedule as one call, on mini-batches.

    python examples/train_step.py                               MUTAG if it is in data/, or handwritten digits

On a GPU the whole step is one CUDA graph, replayed for every mini-batch of a bucket; the loader lays out and pads
mini-batches ahead, and the padding is never seen. On a CPU it is the same step, not recorded.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
from digits import data as digits
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN

import gnncompile


class Classifier(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.gnn = GIN(in_channels, hidden_channels, num_layers, norm="batch_norm")
        self.lin = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, x, edge_index, batch):
        return self.lin(global_add_pool(self.gnn(x, edge_index), batch))


def load(args):
    dataset = common.load(args, TUDataset, "TUDataset", name=args.dataset)
    if dataset is None:
        return *digits.images_as_graphs(), digits.NUM_CLASSES
    dataset, num_classes = dataset.shuffle(), dataset.num_classes
    return dataset[len(dataset) // 10 :], dataset[: len(dataset) // 10], num_classes


def plain_step(model, optimizer, scheduler):
    def step(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return step


def whole_step(model, optimizer, scheduler):
    step = gnncompile.TrainStep(model, F.cross_entropy, optimizer, scheduler=scheduler, max_norm=1.0)
    return lambda data: step(data.x, data.edge_index, data.batch, target=data.y)


def fit(model, make_step, graphs, test_graphs, args, steps, wrap=None):
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(graphs, args.batch_size, shuffle=True, generator=order, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    step = make_step(model, optimizer, scheduler)
    model.train()
    batches = wrap(loader) if wrap else loader
    for _ in range(args.epochs):
        for data in batches:
            steps(step, data.to(args.device))
    model.eval()
    right = 0
    with torch.no_grad():
        for data in DataLoader(test_graphs, args.batch_size):
            data = data.to(args.device)
            right += int((model(data.x, data.edge_index, data.batch).argmax(dim=-1) == data.y).sum())
    return right / len(test_graphs)


def main():
    parser = common.parser(__doc__, hidden_channels=64, num_layers=3, lr=0.005, epochs=20, batch_size=64)
    common.add_dataset(parser, ["MUTAG", "PROTEINS", "ENZYMES"], "digits")
    args = common.parse(parser, epochs=4, num_layers=2, hidden_channels=32)
    graphs, test_graphs, num_classes = load(args)
    eager = Classifier(graphs[0].num_features, args.hidden_channels, num_classes, args.num_layers).to(args.device)
    model = copy.deepcopy(eager)

    def ahead(loader):
        return gnncompile.loader(loader, device=args.device, buckets=True)

    return common.compare(
        {
            "eager": lambda steps: fit(eager, plain_step, graphs, test_graphs, args, steps),
            "TrainStep": lambda steps: fit(model, whole_step, graphs, test_graphs, args, steps, ahead),
        },
        args.device,
        "test accuracy",
        within=0.04,
    )


if __name__ == "__main__":
    sys.exit(main())
