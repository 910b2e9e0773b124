"""Meshes: MeshGraphNet, with a state on every edge, learns how heat spreads over triangles.

    python examples/meshes.py
    python examples/meshes.py --side 40 --num_meshes 100 --hidden_channels 128

Each mesh has its own points, triangles, hot spots and sources of heat; its rim is cold. The network sees the
temperatures of one moment and says how much they change until the next. What it learned is then applied again and
again: a simulation on meshes that it never saw.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
from gnncompile.models import MeshGraphNet
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import gnncompile

MOMENTS = 6  # of a simulation
STEPS = 20  # of the solver from one moment to the next


def triangles(side, generator):
    """A square of `side * side` points, shifted at random, and its edges `[2, num_edges]`, each in both directions."""
    number = torch.arange(side * side).view(side, side)
    corners = number[:-1, :-1], number[:-1, 1:], number[1:, :-1], number[1:, 1:]
    a, b, c, d = (corner.reshape(-1) for corner in corners)
    falling = torch.rand(a.numel(), generator=generator) < 0.5  # which diagonal splits a cell into two triangles
    diagonals = torch.stack([torch.where(falling, a, b), torch.where(falling, d, c)])
    across, down = (torch.stack([one.reshape(-1), other.reshape(-1)]) for one, other in sides(number))
    edges = torch.cat([across, down, diagonals], dim=1)
    shift = 0.5 * torch.rand(side * side, 2, generator=generator) - 0.25
    pos = torch.stack([number // side, number % side], dim=-1).view(-1, 2) + shift
    return pos, torch.cat([edges, edges.flip(0)], dim=1)


def sides(number):
    return (number[:, :-1], number[:, 1:]), (number[:-1], number[1:])


def heat(side, generator):
    """A mesh with temperatures at all moments, `[num_nodes, MOMENTS]`, by small explicit steps."""
    pos, edge_index = triangles(side, generator)
    (source, destination), length = edge_index, (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
    row, column = torch.arange(side * side) // side, torch.arange(side * side) % side
    rim = (torch.minimum(row, column) == 0) | (torch.maximum(row, column) == side - 1)
    supply = 0.5 * (torch.rand(side * side, generator=generator) < 0.03)
    spots = side * torch.rand(5, 2, generator=generator)
    now = 3 * torch.exp(-torch.cdist(pos, spots).square() / (side / 6) ** 2).sum(dim=1)
    now, moments = now.masked_fill(rim, 0), []
    for _ in range(MOMENTS):
        moments.append(now)
        for _ in range(STEPS):
            flow = (now[source] - now[destination]) / length**2
            now = now + 0.02 * (torch.zeros_like(now).index_add(0, destination, flow) + supply)
            now = now.masked_fill(rim, 0)
    away = pos[source] - pos[destination]
    return Data(
        fixed=torch.stack([rim.float(), supply], dim=1),
        edge_index=edge_index,
        edge_attr=torch.cat([away, length.unsqueeze(1)], dim=1),
        moments=torch.stack(moments, dim=1),
        rim=rim,
        num_nodes=side * side,
    )


def moment(mesh, number):
    """One pair of moments to learn from: a mesh with the temperatures of the first, and their change."""
    now, after = mesh.moments[:, number], mesh.moments[:, number + 1]
    x = torch.cat([now.unsqueeze(1), mesh.fixed], dim=1)
    return Data(x=x, edge_index=mesh.edge_index, edge_attr=mesh.edge_attr, y=(after - now).unsqueeze(1))


def load(args):
    """Pairs of moments to train on, and meshes to simulate; changes in units of their deviation."""
    generator = torch.Generator().manual_seed(args.seed)
    spread = torch.randint(-2, 3, (args.num_meshes,), generator=generator).tolist()
    meshes = [heat(args.side + more, generator) for more in spread]
    split = len(meshes) * 3 // 4
    pairs = [moment(mesh, number) for mesh in meshes[:split] for number in range(MOMENTS - 1)]
    unit = float(torch.cat([pair.y for pair in pairs]).std())
    for pair in pairs:
        pair.y = pair.y / unit
    return pairs, meshes[split:], unit


def predict(model, data):
    return model(data.x, data.edge_index, data.edge_attr)


def fit(model, pairs, meshes, unit, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)

    def train(data):
        optimizer.zero_grad()
        loss = F.mse_loss(predict(model, data), data.y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        for data in DataLoader(pairs, args.batch_size, shuffle=True, generator=order):
            steps(train, data.to(args.device))
    return simulate(model, meshes, unit, args)


@torch.no_grad()
def simulate(model, meshes, unit, args):
    """The mean error of the last temperature, from the first ones alone, as a part of how much it changed."""
    data = next(iter(DataLoader(meshes, len(meshes)))).to(args.device)
    now = first = data.moments[:, :1]
    for _ in range(MOMENTS - 1):
        x = torch.cat([now, data.fixed], dim=1)
        now = now + unit * model(x, data.edge_index, data.edge_attr)
        now = now.masked_fill(data.rim.unsqueeze(1), 0)
    last = data.moments[:, -1:]
    return float((now - last).abs().mean() / (last - first).abs().mean())


def main():
    parser = common.parser(
        __doc__, hidden_channels=64, num_layers=4, lr=0.002, epochs=10, batch_size=8, side=20, num_meshes=24
    )
    args = common.parse(parser, epochs=6, hidden_channels=32, num_layers=2, side=14, num_meshes=24)
    pairs, meshes, unit = load(args)

    eager = MeshGraphNet(3, 3, args.hidden_channels, args.num_layers, 1).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))

    data = next(iter(DataLoader(pairs, args.batch_size))).to(args.device)
    common.check(eager, model, lambda m: F.mse_loss(predict(m, data), data.y))
    return common.compare(
        {
            "eager": lambda steps: fit(eager, pairs, meshes, unit, args, steps),
            "gnncompile": lambda steps: fit(model, pairs, meshes, unit, args, steps),
        },
        args.device,
        "simulation error",
        within=0.1,
    )


if __name__ == "__main__":
    sys.exit(main())
