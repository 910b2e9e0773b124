"""Neighbour sampling: GraphSAGE on sampled neighbourhoods of nodes, each of another size.

    python examples/neighbour_sampling.py                       PubMed if it is in data/, or handwritten digits
    python examples/neighbour_sampling.py --num_neighbors 15 10 5

``gnncompile.loader`` wraps PyG's ``NeighborLoader``: it samples, sorts the edges and lays them out, without pyg-lib.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
from digits import data as digits
from torch_geometric.datasets import Planetoid
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE

import gnncompile


def load(args):
    dataset = common.load(args, Planetoid, "Planetoid", name=args.dataset, split="full")
    if dataset is None:
        return digits.images_as_nodes(), digits.NUM_CLASSES
    data = dataset[0]
    data.train_index, data.test_index = data.train_mask.nonzero().view(-1), data.test_mask.nonzero().view(-1)
    return data, dataset.num_classes


def sampled(data, nodes, args):
    """Mini-batches whose first `batch_size` nodes are the ones asked for; `n_id` says which nodes they hold."""
    plain = copy.copy(data)
    del plain.train_index, plain.test_index
    source = NeighborLoader(plain, args.num_neighbors, input_nodes=nodes, batch_size=args.batch_size)
    return gnncompile.loader(source, device=args.device)  # samples, sorts and lays out the edges ahead


def fit(model, data, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)
    x = data.x.to(args.device)

    def train(batch):
        model.train()
        optimizer.zero_grad()
        out = model(x[batch.n_id], batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        nodes = data.train_index[torch.randperm(len(data.train_index), generator=order)]
        for batch in sampled(data, nodes, args):
            steps(train, batch)
    return test(model, data, args)


@torch.no_grad()
def test(model, data, args):
    model.eval()
    right = 0
    x = data.x.to(args.device)
    for batch in sampled(data, data.test_index, args):
        pred = model(x[batch.n_id], batch.edge_index)[: batch.batch_size].argmax(dim=-1)
        right += int((pred == batch.y[: batch.batch_size]).sum())
    return right / len(data.test_index)


def main():
    parser = common.parser(__doc__, hidden_channels=64, lr=0.01, epochs=20, batch_size=128)
    parser.add_argument("--num_neighbors", type=int, nargs="+", default=[10, 5], help="in each hop")
    common.add_dataset(parser, ["PubMed", "Cora", "CiteSeer"], "digits")
    args = common.parse(parser, epochs=6)
    data, num_classes = load(args)

    eager = GraphSAGE(data.num_features, args.hidden_channels, len(args.num_neighbors), num_classes).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))

    batch = next(iter(sampled(data, data.train_index, args)))
    x = data.x.to(args.device)[batch.n_id]
    common.check(eager, model, lambda m: F.cross_entropy(m(x, batch.edge_index), batch.y))
    return common.compare(
        {
            "eager": lambda steps: fit(eager, data, args, steps),
            "gnncompile": lambda steps: fit(model, data, args, steps),
        },
        args.device,
        "test accuracy",
        within=0.03,
    )


if __name__ == "__main__":
    sys.exit(main())
