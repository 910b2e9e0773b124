"""Both rows of an edge list enter compiled code in its own memory, and never when that holds something else."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import gnncompile
from gnncompile import _compat
from gnncompile.capture import edge_rows
from gnncompile.capture.compile import callable_of
from gnncompile.capture.inputs import Derived
from tests.harness import light
from tests.tape import tapes

NODES = 7


def edges(count: int = 20) -> Tensor:
    return torch.randint(NODES, (2, count))


@pytest.fixture
def derived() -> Derived:
    return Derived(8, 2**20)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with light():
        torch.manual_seed(0)
        yield GCNConv(4, 4)


@pytest.fixture
def compiled(model: Any) -> Any:
    return gnncompile.compile(model)


class Decoder(nn.Module):
    """Reads the nodes of each edge, which autograd keeps the edges for."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(torch.cat([x[edge_index[0]], x[edge_index[1]]], 1).relu())  # type: ignore[no-any-return]


def check(model: Any, compiled: Any, edge_index: Tensor) -> None:
    x = torch.randn(NODES, 4)
    torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index), rtol=1e-5, atol=1e-5)


def builds(compiled: Any) -> int:
    """How often the structure of a graph was built."""
    return sum(captured.structure.cache.misses for captured in callable_of(compiled).backend.captured)


@pytest.mark.parametrize("count", [0, 1, 2, 15])
def test_rows_are_in_its_memory(derived: Derived, count: int) -> None:
    edge_index = edges(count)
    rows = derived.rows(edge_index)
    assert all(map(torch.equal, rows, edge_index))
    assert [row.data_ptr() for row in rows] == [row.data_ptr() for row in edge_index]
    for row in rows:
        assert not row._is_view() and row.storage_offset() == 0 and row.stride() == (1,)
    assert derived.rows(edge_index)[1] is rows[1]


def test_an_edge_list_in_a_new_object_of_each_call_keeps_its_rows() -> None:
    """Between new graphs, of which more come than are remembered."""
    derived, graph = Derived(4, 2**20), edges(0)
    first = [derived.rows(graph[:])[0].data_ptr() for _ in range(2)][1]
    for k in range(12):
        derived.rows(edges(k))
        assert derived.rows(graph[:])[0].data_ptr() == first


def test_a_change_is_noticed(derived: Derived) -> None:
    edge_index = edges()
    before = derived.rows(edge_index)
    edge_index[0] += 1
    after = derived.rows(edge_index)
    assert after[0] is not before[0] and after[0]._version == edge_index._version
    other = edges()
    edge_index.data = other
    assert derived.rows(edge_index)[0].data_ptr() == other.data_ptr()


def test_a_change_before_the_backward_is_an_error() -> None:
    """As without compiling: what the backward reads is no more what the forward read."""
    torch.manual_seed(0)
    model, x, edge_index = Decoder(), torch.randn(NODES, 4, requires_grad=True), edges()
    compiled = gnncompile.compile(model)
    for one in (compiled, compiled, model):
        out = one(x, edge_index)
        edge_index[0] = 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_change_before_the_backward_is_none_of_an_index_of_its_own() -> None:
    """Op by op, the backward reads the index whose negative entries were counted from the end in the forward."""
    torch.manual_seed(0)
    model, x, edge_index = Decoder(), torch.randn(NODES, 4, requires_grad=True), edges()
    compiled = gnncompile.compile(model, options={"inductor": False})
    expected = torch.autograd.grad(model(x, edge_index).sum(), x)
    out = compiled(x, edge_index)
    edge_index[0] = 3
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), expected)


def test_other_tensors_over_memory_that_was_written_are_other_graphs(model: Any) -> None:
    """Each counts the changes of an array anew."""
    model = copy.deepcopy(model)
    memory = edges().numpy()
    with tapes():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = gnncompile.TrainStep(model, lambda out, _: out.square().mean(), optimizer, options={"inductor": False})
        edge_index, x = torch.from_numpy(memory), torch.randn(NODES, 4)
        for _ in range(5):
            step(x, edge_index)
        assert step.not_recorded is None
        for _ in range(5):
            memory[:] = edges().numpy()
            edge_index = torch.from_numpy(memory)
            torch.testing.assert_close(step(x, edge_index), model(x, edge_index).square().mean())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [4, 5])
def test_rows_begin_where_no_call_has_to_copy_them(derived: Derived, count: int) -> None:
    edge_index = edges(count).cuda()
    rows = derived.rows(edge_index)
    assert all(map(torch.equal, rows, edge_index)) and all(row.data_ptr() % 16 == 0 for row in rows)
    assert (rows[1].data_ptr() == edge_index[1].data_ptr()) == (count == 4)
    assert derived.rows(edge_index)[1] is rows[1]


def test_memory_ends_with_the_edge_list(derived: Derived) -> None:
    known = len(edge_rows._shared)
    edge_index = edges()
    derived.rows(edge_index)
    edge_index += 0
    derived.rows(edge_index)
    assert len(edge_rows._shared) == known + 1
    memory = _compat.StorageWeakRef(edge_index.untyped_storage())
    assert not memory.expired()
    del edge_index
    gc.collect()
    assert memory.expired() and len(edge_rows._shared) == known


def test_rows_that_are_held_keep_their_memory(derived: Derived) -> None:
    """As those that autograd holds do, where the edge list is gone before the backward."""
    edge_index = edges()
    memory, expected = _compat.StorageWeakRef(edge_index.untyped_storage()), edge_index.clone()
    rows = derived.rows(edge_index)
    alive = [weakref.ref(row) for row in rows]
    del edge_index
    gc.collect()
    assert not memory.expired() and all(map(torch.equal, rows, expected))
    del rows
    gc.collect()
    assert memory.expired() and not any(row() is not None for row in alive)


@pytest.mark.parametrize("count", [0, 1, 15])
def test_strided_rows_are_copied(derived: Derived, count: int) -> None:
    edge_index = torch.randint(NODES, (count, 2)).t()
    rows = derived.rows(edge_index)
    assert all(map(torch.equal, rows, edge_index)) and all(row.stride() == (1,) for row in rows)
    assert derived.rows(edge_index)[0] is rows[0]


def test_inference(derived: Derived) -> None:
    edge_index = edges()
    with torch.inference_mode():
        assert not derived.rows(edge_index)[0].is_inference()
        unversioned = edges()
        rows = derived.rows(unversioned)
        unversioned += 1
        assert not torch.equal(derived.rows(unversioned)[0], rows[0])
    assert derived.rows(unversioned)[0].data_ptr() != unversioned.data_ptr()


def test_copies_and_files_have_none(model: Any, compiled: Any) -> None:
    edge_index = edges()
    check(model, compiled, edge_index)
    file = io.BytesIO()
    torch.save(edge_index, file)
    file.seek(0)
    for other in (copy.deepcopy(edge_index), torch.load(file, weights_only=True)):
        assert not vars(other)
        other[0] = 0
        check(model, compiled, other)
    check(model, compiled, edge_index)


def test_structure_is_built_once(model: Any, compiled: Any) -> None:
    edge_index = edges()
    for _ in range(3):
        check(model, compiled, edge_index)
    assert builds(compiled) == 1
    edge_index[0] = 3
    for _ in range(3):
        check(model, compiled, edge_index)
    assert builds(compiled) == 2


def test_another_tensor_in_each_call(model: Any, compiled: Any) -> None:
    """A view made anew for each call would otherwise be a graph of its own each time."""
    all_edges = edges()
    for _ in range(5):
        check(model, compiled, all_edges[:, :12])
    assert builds(compiled) == 2  # of the rows in its memory, and of the copies


def test_sizes_are_not_guarded(model: Any, compiled: Any) -> None:
    for count in (20, 1, 0, 2, 33):
        check(model, compiled, edges(count))
    assert len(callable_of(compiled).backend.captured) == 1
