"""Molecules with forces: the forces are the gradient of the energy, and training on them takes a gradient of that.

    python examples/molecules_with_forces.py           MD17's aspirin if it is in data/MD17, or generated molecules

torch can't differentiate twice what it compiled. With ``options={"double_backward": True}`` the fused regions are still
there, with gradients that have gradients, and all else runs op by op. After training, forces take one gradient only:
the same model, compiled without that option, is what simulates.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
from torch_geometric.datasets import MD17
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MessagePassing, global_add_pool
from torch_geometric.transforms import BaseTransform

import gnncompile
from gnncompile import testing


class Interaction(MessagePassing):
    """A continuous-filter convolution, as SchNet has it (https://arxiv.org/abs/1706.08566)."""

    def __init__(self, channels, num_gaussians):
        super().__init__(aggr="add")
        self.filter = torch.nn.Linear(num_gaussians, channels)
        self.lin = torch.nn.Linear(channels, channels)

    def forward(self, x, edge_index, gaussians):
        return x + self.lin(self.propagate(edge_index, x=x, w=self.filter(gaussians))).tanh()

    def message(self, x_j, w):
        return x_j * w


class Energy(torch.nn.Module):
    def __init__(self, hidden_channels, num_layers, num_gaussians=16, cutoff=6.0):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, hidden_channels)
        self.layers = torch.nn.ModuleList(Interaction(hidden_channels, num_gaussians) for _ in range(num_layers))
        self.out = torch.nn.Sequential(
            torch.nn.Linear(hidden_channels, hidden_channels), torch.nn.SiLU(), torch.nn.Linear(hidden_channels, 1)
        )
        self.register_buffer("centres", torch.linspace(0, cutoff, num_gaussians))

    def forward(self, z, pos, edge_index, batch):
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1, keepdim=True)
        gaussians = torch.exp(-((distance - self.centres) ** 2))
        x = self.embedding(z)
        for layer in self.layers:
            x = layer(x, edge_index, gaussians)
        return global_add_pool(self.out(x), batch).view(-1)


class AllPairs(BaseTransform):
    """Edges between all atoms of a molecule."""

    def forward(self, data):
        data.edge_index = torch.combinations(torch.arange(data.num_nodes)).t()
        data.edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
        return data


def generated(num_molecules, seed):
    """Molecules in a Morse potential whose depth depends on the elements, with energy ``[1]`` and force ``[n, 3]``."""
    graphs = []
    for data in testing.molecules(num_molecules, 6, 12, channels=None, seed=seed):
        data = AllPairs()(data)
        pos = data.pos.requires_grad_()
        (row, col), depth = data.edge_index, data.z.float() / 10
        distance = (pos[row] - pos[col]).norm(dim=-1)
        data.energy = (depth[row] * depth[col] * ((1 - torch.exp(1.5 - distance)) ** 2 - 1)).sum().view(1) / 2
        data.force = -torch.autograd.grad(data.energy.sum(), pos)[0]
        data.pos, data.energy, data.y = pos.detach(), data.energy.detach(), None
        graphs.append(data)
    return graphs


def load(args):
    """Molecules to train and to test on; energies and forces in units of the forces' deviation."""
    dataset = common.load(args, MD17, "MD17", name=args.dataset, transform=AllPairs())
    graphs = generated(args.num_molecules, args.seed) if dataset is None else list(dataset[: args.num_molecules])
    unit = torch.cat([data.force for data in graphs]).std()
    mean = torch.cat([data.energy for data in graphs]).mean()
    for data in graphs:
        data.energy, data.force = (data.energy - mean) / unit, data.force / unit
    return graphs[: len(graphs) * 3 // 4], graphs[len(graphs) * 3 // 4 :]


def predict(model, data, training=False):
    """Energies and forces; with a graph of the gradient too, if they are to be trained on."""
    pos = data.pos.detach().requires_grad_()
    energy = model(data.z, pos, data.edge_index, data.batch)
    (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=training)
    return energy, -gradient


def loss_of(model, data):
    energy, force = predict(model, data, training=True)
    return 0.01 * F.mse_loss(energy, data.energy) + F.mse_loss(force, data.force)


def fit(model, graphs, test_graphs, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)

    def train(data):
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        for data in DataLoader(graphs, args.batch_size, shuffle=True, generator=order):
            steps(train, data.to(args.device))
    return force_error(model, test_graphs, args)


def force_error(model, graphs, args):
    """The mean error of a force, as a part of the mean force."""
    data = next(iter(DataLoader(graphs, len(graphs)))).to(args.device)
    return float((predict(model, data)[1] - data.force).abs().mean() / data.force.abs().mean())


def simulate(model, data, steps):
    """Forces again and again, as a simulation needs them; returns the largest."""
    for _ in range(20):
        steps(lambda: predict(model, data)[1].abs().max())
    return float(steps.losses[-1])


def main():
    parser = common.parser(
        __doc__, hidden_channels=64, num_layers=3, lr=0.005, epochs=40, batch_size=32, num_molecules=400
    )
    common.add_dataset(parser, ["aspirin", "benzene", "ethanol"], "generated")
    args = common.parse(parser, epochs=10, num_layers=2, hidden_channels=32)
    graphs, test_graphs = load(args)

    eager = Energy(args.hidden_channels, args.num_layers).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager), options={"double_backward": True})

    data = next(iter(DataLoader(graphs, args.batch_size))).to(args.device)
    common.check(eager, model, lambda m: loss_of(m, data))
    status = common.compare(
        {
            "eager": lambda steps: fit(eager, graphs, test_graphs, args, steps),
            "gnncompile": lambda steps: fit(model, graphs, test_graphs, args, steps),
        },
        args.device,
        "force error",
        within=0.05,
    )

    print("\nForces only, of the trained model:")
    eager.requires_grad_(False)  # compiled, all gradients come together: none but the positions' is wanted now
    fast = gnncompile.compile(eager)  # shares the weights
    data = next(iter(DataLoader(test_graphs, len(test_graphs)))).to(args.device)
    ways = {"eager": eager, "gnncompile": fast}
    fits = {name: lambda steps, m=m: simulate(m, data, steps) for name, m in ways.items()}
    return status or common.compare(fits, args.device, "largest force", within=1e-3)


if __name__ == "__main__":
    sys.exit(main())
