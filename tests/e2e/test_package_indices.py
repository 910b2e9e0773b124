"""Packages on a CPU refuse indices out of range in words, wherever the model gathers or scatters by them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gnncompile
from tests.e2e.test_package import agree, serve

CHANNELS, TYPES, NODES, EDGES = 8, 5, 6, 10
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Gathers(nn.Module):
    """Embeddings of atoms and bonds, a table by type, reverse edges, a gather and an addition by an index of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(TYPES, CHANNELS), nn.Embedding(TYPES, CHANNELS)
        self.register_buffer("table", torch.randn(TYPES, CHANNELS))

    def forward(self, z: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, place: Tensor) -> Tensor:
        source, destination = edge_index
        x = self.atoms(z)
        state = (x[source] + self.bonds(types[:, 0])).relu() * self.table[types[:, 1]]
        received = torch.zeros_like(x).index_add(0, destination, state - state[reverse].tanh())
        wide = place.view(-1, 1).expand(-1, CHANNELS)
        return received + received.gather(0, wide) + torch.zeros_like(x).scatter_add(0, wide, received)


def inputs(nodes: int = NODES, pairs: int = EDGES // 2) -> Inputs:
    ends = torch.randint(nodes, (pairs, 2))
    edge_index = torch.stack([ends, ends.flip(1)], 1).view(-1, 2).t().contiguous()
    types, reverse = torch.randint(TYPES, (2 * pairs, 2)), torch.arange(2 * pairs) ^ 1
    return torch.randint(TYPES, (nodes,)), edge_index, types, reverse, torch.randint(nodes, (nodes,))


def replaced(given: Inputs, at: int, place: tuple[int, ...], number: int) -> Inputs:
    """Returns inputs of which one has another number at a place."""
    changed = given[at].clone()
    changed[place] = number
    return (*given[:at], changed, *given[at + 1 :])


def test_wrong_indices_are_errors_in_words(tmp_path):
    torch.manual_seed(0)
    model, path = Gathers().eval(), tmp_path / "gathers.pt2"
    gnncompile.package(model, inputs(20, 40), path)
    good, empty, one = inputs(), inputs(3, 0), inputs(1, 1)
    wrong = {
        f"is {TYPES}, expected numbers from 0 to {TYPES - 1}": replaced(good, 0, (2,), TYPES),
        "entry 1 of an index is -1, expected numbers from 0": replaced(good, 0, (1,), -1),
        f"is {2**40}, expected": replaced(good, 2, (3, 0), 2**40),
        f"is 77, expected numbers from -{TYPES} to {TYPES - 1}": replaced(good, 2, (3, 1), 77),
        f"is {-EDGES - 1}, expected numbers from -{EDGES} to {EDGES - 1}": replaced(good, 3, (4,), -EDGES - 1),
        f"is {NODES}, expected numbers from 0 to {NODES - 1}": replaced(good, 4, (5,), NODES),
        f"entry 2 of an index is {NODES}": replaced(good, 1, (0, 2), NODES),
        "types: found shape [10, 3], expected 2 in dimension 1": (*good[:2], torch.zeros(10, 3).long(), *good[3:]),
    }
    negative = replaced(replaced(good, 3, (4,), -1), 2, (0, 1), -TYPES)
    right = [good, empty, one, negative]
    answers, said = serve(path, [*right, *(call for bad in wrong.values() for call in (bad, good))], tmp_path)
    agree(model, [*right, *[good] * len(wrong)], [*answers[: len(right)], *answers[len(right) + 1 :: 2]])
    for expected, found in zip(wrong, answers[len(right) :: 2], strict=True):
        assert isinstance(found, str)
        assert expected in (found if torch.__version__ >= "2.13" else said)


def test_an_operation_that_checks_its_own_index_can_be_packaged(tmp_path):
    class Takes(Gathers):
        def forward(self, z: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, place: Tensor) -> Tensor:
            return super().forward(z, edge_index, types, reverse, place) + self.table.take(z).unsqueeze(1)

    torch.manual_seed(0)
    model, path = Takes().eval(), tmp_path / "takes.pt2"
    gnncompile.package(model, inputs(20, 40), path)
    good = inputs()
    agree(model, [good], serve(path, [good], tmp_path)[0])


def test_indices_of_32_bits(tmp_path):
    torch.manual_seed(0)
    model, path = nn.Embedding(TYPES, CHANNELS).eval(), tmp_path / "embedding.pt2"
    good = torch.randint(TYPES, (4, 3)).int()
    gnncompile.package(model, (good,), path)
    wrong = replaced((good,), 0, (1, 2), TYPES)
    answers, said = serve(path, [(good,), wrong], tmp_path)
    agree(model, [(good,)], answers[:1])
    assert f"entry 5 of an index is {TYPES}" in (answers[1] if torch.__version__ >= "2.13" else said)
