"""Equivariant forces: PaiNN takes its forces as a gradient inside of ``forward``, and is trained on them.

    python examples/equivariant_forces.py
    python examples/equivariant_forces.py --num_molecules 2000 --hidden_channels 128

Energy and forces are one captured graph, fused, without an option: gnncompile writes the gradient of the energy out.
molecules_with_forces.py takes the gradient outside of its model instead. The molecules are generated: bonds and the
angles between them are springs, so that directions matter.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
from gnncompile.models import PaiNN
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool

import gnncompile
from gnncompile import testing

CUTOFF = 4.0


def angles(edge_index):
    """Pairs of bonds that leave the same atom: their indices, ``[2, num_angles]``."""
    source, order = edge_index[0].sort(stable=True)
    number = torch.arange(source.numel())
    pairs = []
    for apart in range(1, int(torch.bincount(source).max())):
        first = number[:-apart][source[:-apart] == source[apart:]]
        pairs.append(torch.stack([order[first], order[first + apart]]))
    return torch.cat(pairs, dim=1)


def potential(pos, bonds, pairs):
    """Energies of stretched bonds, ``[num_edges]``, and of bent angles, ``[num_angles]``."""
    vectors = pos[bonds[1]] - pos[bonds[0]]
    length = vectors.norm(dim=-1)
    unit = vectors / length.unsqueeze(1)
    cosine = (unit[pairs[0]] * unit[pairs[1]]).sum(dim=-1)
    return 2 * (length - 1.5) ** 2, (cosine + 1 / 3) ** 2


def with_gradient(pos, bonds, pairs):
    pos = pos.detach().requires_grad_()
    energies = potential(pos, bonds, pairs)
    return energies, torch.autograd.grad(torch.cat(energies).sum(), pos)[0]


def generated(num_molecules, seed):
    """Shaken molecules with energies ``energy``, ``[1]``, and forces ``force``, ``[num_nodes, 3]``."""
    torch.manual_seed(seed)
    data = Batch.from_data_list(testing.molecules(num_molecules, 6, 12, channels=None, seed=seed))
    bonds, pairs, pos = data.edge_index, angles(data.edge_index), data.pos
    for _ in range(60):  # down to where the molecules are at rest
        pos = pos - 0.05 * with_gradient(pos, bonds, pairs)[1].clamp(-2, 2)
    pos = pos + 0.1 * torch.randn(pos.shape)
    (stretched, bent), gradient = with_gradient(pos, bonds, pairs)
    energy = global_add_pool(stretched, data.batch[bonds[0]], num_molecules)
    energy = energy + global_add_pool(bent, data.batch[bonds[0][pairs[0]]], num_molecules)
    graphs = []
    for k in range(num_molecules):
        its = data.batch == k
        near = torch.cdist(pos[its], pos[its]).fill_diagonal_(CUTOFF) < CUTOFF
        edge_index = near.nonzero().t()
        graph = Data(z=data.z[its], pos=pos[its], edge_index=edge_index, energy=energy[k : k + 1].detach())
        graph.force = -gradient[its]
        graphs.append(graph)
    return graphs


def load(args):
    """Molecules to train and to test on; energies and forces in units of the forces' deviation."""
    graphs = generated(args.num_molecules, args.seed)
    unit = torch.cat([data.force for data in graphs]).std()
    mean = torch.cat([data.energy for data in graphs]).mean()
    for data in graphs:
        data.energy, data.force = (data.energy - mean) / unit, data.force / unit
    return graphs[: len(graphs) * 3 // 4], graphs[len(graphs) * 3 // 4 :]


def predict(model, data):
    return model(data.z, data.pos, data.edge_index, data.batch, data.num_graphs)


def loss_of(model, data):
    energy, force = predict(model, data)
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

    model.train()
    for _ in range(args.epochs):
        for data in DataLoader(graphs, args.batch_size, shuffle=True, generator=order):
            steps(train, data.to(args.device))
    return force_error(model, test_graphs, args)


@torch.no_grad()
def force_error(model, graphs, args):
    """The mean error of a force, as a part of the mean force."""
    data = next(iter(DataLoader(graphs, len(graphs)))).to(args.device)
    force = predict(model.eval(), data)[1]
    return float((force - data.force).abs().mean() / data.force.abs().mean())


def main():
    parser = common.parser(
        __doc__, hidden_channels=64, num_layers=2, lr=0.005, epochs=20, batch_size=32, num_molecules=600
    )
    args = common.parse(parser, epochs=12, num_layers=1, hidden_channels=32, num_molecules=400)
    graphs, test_graphs = load(args)

    eager = PaiNN(args.hidden_channels, args.num_layers, cutoff=CUTOFF).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager), fullgraph=True)

    data = next(iter(DataLoader(graphs, args.batch_size))).to(args.device)
    common.check(eager, model, lambda m: loss_of(m, data))
    return common.compare(
        {
            "eager": lambda steps: fit(eager, graphs, test_graphs, args, steps),
            "gnncompile": lambda steps: fit(model, graphs, test_graphs, args, steps),
        },
        args.device,
        "force error",
        within=0.1,
    )


if __name__ == "__main__":
    sys.exit(main())
