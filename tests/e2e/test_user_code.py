"""Message passing written by hand, with in-place writes, masks and odd spellings: equal to eager or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import remove_self_loops, scatter, softmax

import gnncompile
from gnncompile.capture.compile import callable_of
from tests.harness import light
from tests.tracing import WIDTH, add, check, data, zeros


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


COUNTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "number of edges": lambda x, e, w: x * e.size(1),
    "constants per edge": lambda x, e, w: x * torch.ones(e.size(1)).sum(),
    "mean of an edge attribute": lambda x, e, w: x * w.mean(),
    "an edge attribute itself": lambda x, e, w: w,
}


@pytest.mark.parametrize("reader", COUNTERS)
def test_attributes_and_counts_of_masked_edges(reader: str):
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return COUNTERS[reader](x, *remove_self_loops(torch.stack([row, col]), row.float()))

    check(fn, *data(), run=gnncompile.compile(fn))


# -- the user's own code ------------------------------------------------------------------------------------------


def _half_frozen(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = add(x, col, x[row])
    return fixed * x + add(x, col, x[row].exp())


def _write_before(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    x = x * 1
    x[0] = 3.0
    return add(x, col, x[row])


def _write_to_the_result(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    out = zeros(x)
    out.index_add_(0, col, x[row])
    out[0].mul_(2)
    return out


def _write_after_gather(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    x = x * 1
    message = x[row]
    x[0].mul_(2)
    return add(x, col, message) + x


def _write_to_copied_index(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    row = row.clone()
    row[3:5].add_(1).remainder_(x.size(0))
    return add(x, col, x[row])


def _two_integer_tensors(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    a, b = torch.zeros(WIDTH, dtype=torch.long), torch.zeros(WIDTH, dtype=torch.long)
    a[0] = 5
    b[1] = 7
    return x + a + 10 * b


def _masks_add_up(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return add(x, col, (x[row] > 0) * 1.0 + (x[col] > 0) * 1.0)


def _hardtanh_at_its_ends(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return add(x, col, F.hardtanh(x[row] - x[row].detach() + 1.0))


def _rsub_alpha(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return add(x, col, torch.rsub(x[row], 1.5, alpha=2))


def _dot_for_all_features(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    message = (x[row] * x[col].sin()).sum(-1, keepdim=True).expand(-1, WIDTH)
    return add(x, col, message).view(-1, 2, WIDTH // 2).flatten(1) + add(x, col, message.exp() * 0.1)


def _index_put_one_number(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return x * x.new_zeros(x.size(0)).index_put_((col,), torch.tensor(1.0), accumulate=True).view(-1, 1)


def _size_from_an_inner_index(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return scatter(x[row], (col + 1) % x.size(0), 0, reduce="sum")


USER_CODE = [
    _half_frozen,
    _write_before,
    _size_from_an_inner_index,
    _write_to_the_result,
    _write_after_gather,
    _write_to_copied_index,
    _two_integer_tensors,
    _masks_add_up,
    _hardtanh_at_its_ends,
    _rsub_alpha,
    _dot_for_all_features,
    _index_put_one_number,
]


@pytest.mark.parametrize("fn", USER_CODE, ids=lambda f: f.__name__.strip("_"))
def test_code_by_hand(fn: Callable[..., Tensor]):
    compiled = gnncompile.compile(fn)
    for _ in range(2):  # the second call finds the remembered structure
        check(fn, *data(), run=compiled)


def test_rows_without_edges_may_be_infinite():
    """Nothing is multiplied with a row that no edge has, in the gradient as in eager."""

    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        norm = x.new_zeros(x.size(0)).index_add_(0, row, x.new_ones(row.size(0))).pow(-0.5)
        return add(x, col, (x * norm.view(-1, 1))[row] * (x[col] / norm[col].view(-1, 1)).sigmoid())

    x, _, _ = data()
    row, col = torch.tensor([0, 0, 1, 2]), torch.tensor([1, 2, 2, 0])
    results = []
    for run in (gnncompile.compile(fn), fn):
        leaf = x.clone().requires_grad_()
        out = run(leaf, row, col)
        results.append([out, *torch.autograd.grad(out.sum(), leaf)])
    assert results[1][0].isfinite().all()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_softmax_of_what_no_edge_has():
    """Both factors of a dot product's weight are rows of the destination, and 0/0 where it has no edge."""

    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        alpha = softmax(x[col].abs().sum(-1, keepdim=True), col, num_nodes=x.size(0))
        return add(x, col, x[col].detach() * x[col] * alpha)

    compiled = gnncompile.compile(fn)
    for row, col in ([0, 0, 1, 2], [1, 2, 2, 0]), ([], []), ([3], [4]):
        check(fn, data()[0], torch.tensor(row).long(), torch.tensor(col).long(), run=compiled)


def test_products_by_an_int32_index():
    """Eager with int64: with int32 the gradient of torch's own scatter_reduce is wrong."""

    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return scatter(x[row], col, 0, x.size(0), "mul")

    x, row, col = data()
    results = []
    for run, dtype in ((gnncompile.compile(fn), torch.int32), (fn, torch.int64)):
        leaf = x.clone().requires_grad_()
        out = run(leaf, row.to(dtype), col.to(dtype))
        results.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_one_feature_per_edge_is_one_graph():
    """A size of 1 that broadcasts is a width, and known; the number of edges and nodes stays open."""

    def fn(x: Tensor, row: Tensor, col: Tensor, weight: Tensor) -> Tensor:
        return add(x, col, x[row] * weight)

    compiled = gnncompile.compile(fn, fullgraph=True)
    for nodes, edges in ((6, 14), (4, 0), (1, 1), (1, 0), (9, 1)):
        row, col = torch.randint(nodes, (2, edges))
        check(fn, torch.randn(nodes, WIDTH), row, col, torch.randn(edges, 1), run=compiled)
    assert len(callable_of(compiled).backend.captured) == 1


def _unless_empty(x: Tensor, row: Tensor, col: Tensor, picked: Tensor) -> Tensor:
    y = add(x, col, x[row])
    return y if picked.numel() == 0 else y + picked.max()


def _if_any(x: Tensor, row: Tensor, col: Tensor, picked: Tensor) -> Tensor:
    y = add(x, col, x[row])
    return y + picked[0] if picked.size(0) > 0 else -y


@pytest.mark.parametrize("fn", [_unless_empty, _if_any])
def test_a_question_of_emptiness_is_asked_of_every_input(fn: Callable[..., Tensor]):
    x, row, col = data()
    compiled = gnncompile.compile(fn)
    for picked in (torch.tensor([3, 4]), torch.zeros(0, dtype=torch.long), torch.tensor([7]), torch.tensor([5, 6, 7])):
        torch.testing.assert_close(compiled(x, row, col, picked), fn(x, row, col, picked))
    report = gnncompile.explain(fn, x, row, col, torch.tensor([1, 2]))
    assert report.graph_breaks == 0 and any("is empty" in note for note in report.notes)


# -- tables whose sizes are equal, but not for all graphs -------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, rows: Tensor, edge_index: Tensor) -> Tensor:
    source, destination = edge_index
    alpha = softmax((query[destination] * key[source]).sum(-1), destination, num_nodes=query.size(0))
    return scatter(rows[source] * alpha.view(-1, 1), destination, 0, query.size(0))


def test_keys_and_values_of_their_own():
    """One region for all graphs with as many keys as values; another capture for the first that has more values."""
    torch.manual_seed(0)
    compiled = gnncompile.compile(_attention, fullgraph=True)
    program = callable_of(compiled)
    assert program is not None
    captured = program.backend.captured
    for nodes, sources, values, edges, graphs in ((4, 6, 6, 15, 1), (3, 9, 9, 7, 1), (5, 5, 5, 0, 1), (4, 6, 8, 15, 2)):
        shapes = ((nodes, WIDTH), (sources, WIDTH), (values, WIDTH))
        tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
        edge_index = torch.stack([torch.randint(sources, (edges,)), torch.randint(nodes, (edges,))])
        results = []
        for fn in (compiled, _attention):
            out = fn(*tensors, edge_index)
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
        assert len(captured) == graphs
    assert len(captured[0].log.regions) == 1 and not captured[0].log.skipped


class _Scalars(nn.Module):
    """Writes to scalars of its own, and reads one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.norm = nn.Buffer(torch.zeros(())), nn.Buffer(torch.ones(()))
        self.layer = GCNConv(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls.add_(1)
        self.norm.copy_(x.detach().norm())
        return self.layer(x / self.calls, edge_index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalars_that_are_written_to(dtype):
    """Torch takes those of float64 for numbers, and drops what writes to them."""
    plain = _Scalars().to(dtype)
    compiled = gnncompile.compile(copy.deepcopy(plain), fullgraph=True)
    for _ in range(3):
        x, edge_index = torch.randn(5, WIDTH, dtype=dtype), torch.randint(5, (2, 9))
        torch.testing.assert_close(compiled(x, edge_index), plain(x, edge_index))
        torch.testing.assert_close(compiled.state_dict(), plain.state_dict())
