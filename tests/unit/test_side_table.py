"""Side tables: a value belongs to one tensor object, lives as long as the tensor, and is found from every thread."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch_geometric.nn import global_add_pool

import gnncompile
from gnncompile.layout import csr
from gnncompile.layout.batch_metadata import BatchMetadata, attach, attached
from gnncompile.layout.side_table import SideTable
from gnncompile.ops import segment


class Value:
    """A value that weak references can watch."""


def table_of(tensor: Tensor) -> tuple[SideTable[Value], Value]:
    table, value = SideTable[Value](), Value()
    table.set(tensor, value)
    return table, value


def reloaded(tensor: Tensor) -> Tensor:
    written = io.BytesIO()
    torch.save(tensor, written)
    written.seek(0)
    return torch.load(written)  # type: ignore[no-any-return]


def test_a_value_is_found_by_identity() -> None:
    tensor, equal = torch.arange(4), torch.arange(4)
    table, value = table_of(tensor)
    assert table.get(tensor) is value and table.get(equal) is None
    other = Value()
    table.set(equal, other)
    assert table.get(equal) is other and table.get(tensor) is value and len(table) == 2
    table.set(tensor, other)
    assert table.get(tensor) is other and len(table) == 2
    assert SideTable[Value]().get(tensor) is None


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t.view(-1),
        lambda t: t[:],
        lambda t: t.detach(),
        lambda t: t.clone(),
        lambda t: torch.empty(0, dtype=t.dtype).set_(t),
        copy.copy,
        copy.deepcopy,
        reloaded,
    ],
    ids=["view", "slice", "detach", "clone", "alias", "copy", "deepcopy", "save"],
)
def test_other_tensors_have_no_value(derive: Callable[[Tensor], Tensor]) -> None:
    """Nor in the package's own tables: nothing is left on the tensor that a copy or a file would take along."""
    tensor = torch.arange(6, dtype=torch.int32)
    table, value = table_of(tensor)
    csr.give_hubs(tensor, tensor.new_empty(0, 3), tensor.new_empty(0), csr.NO_HUBS, 4)
    attach(tensor, BatchMetadata())
    assert not tensor.__dict__
    derived = derive(tensor)
    assert table.get(derived) is None and csr.given_hubs(derived) is None and attached(derived) is None
    assert table.get(tensor) is value and csr.given_hubs(tensor) is not None and attached(tensor) is not None


@pytest.mark.parametrize("cycle", [False, True])
def test_a_value_dies_with_its_tensor(cycle: bool) -> None:
    tensor = torch.arange(4)
    table, value = table_of(tensor)
    watched, there = weakref.ref(value), weakref.ref(tensor)
    del value
    if cycle:
        ring: list[Any] = [tensor]
        ring.append(ring)
        del ring
    del tensor
    if cycle:
        gc.collect()
    assert there() is None and watched() is None and len(table) == 0


def test_an_address_that_is_used_again_has_no_value() -> None:
    table: SideTable[int] = SideTable()
    for k in range(2000):
        tensor = torch.empty(1)
        assert table.get(tensor) is None
        table.set(tensor, k)
        assert table.get(tensor) == k and len(table) <= 2


def test_a_table_may_die_before_its_tensors() -> None:
    tensor = torch.arange(4)
    table, value = table_of(tensor)
    watched = weakref.ref(value)
    del table, value
    gc.collect()
    assert watched() is None
    del tensor


class Saves(torch.autograd.Function):
    """Saves its second argument for the backward, and shows there what a table has for it."""

    seen: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, table: SideTable[Value]) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.table = table
        return x * 2

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (kept,) = ctx.saved_tensors
        Saves.seen = ctx.table.get(kept)
        return given[0] * 2, None, None


@pytest.mark.parametrize("cycle", [False, True])
def test_a_tensor_that_only_autograd_holds(cycle: bool) -> None:
    """Its last Python reference is gone for a while; in a cycle, the garbage collector has met it as well."""
    kept, x = torch.arange(4), torch.ones(3, requires_grad=True)
    table, value = table_of(kept)
    if cycle:
        kept.ring = [kept]  # type: ignore[attr-defined]
    out = Saves.apply(x, kept, table)
    del kept
    gc.collect()
    assert len(table) == 1
    (back,) = out.grad_fn.saved_tensors
    assert table.get(back) is value
    del back
    gc.collect()
    out.sum().backward()
    assert Saves.seen is value
    Saves.seen = None
    del out
    gc.collect()
    assert len(table) == 0


def test_a_tensor_that_an_operation_of_torch_saved() -> None:
    index, x = torch.tensor([0, 1, 1]), torch.ones(3, requires_grad=True)
    table, value = table_of(index)
    out: Any = x.index_select(0, index)
    del index
    gc.collect()
    assert table.get(out.grad_fn._saved_index) is value


def test_threads() -> None:
    """Each finds its own values, and those of a tensor that all share, while tensors are born and die."""
    table: SideTable[int] = SideTable()
    shared = torch.arange(4)
    table.set(shared, -1)
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for k in range(1500):
            mine = [torch.empty(1) for _ in range(3)]
            for tensor in mine:
                if table.get(tensor) is not None:
                    wrong.append("a new tensor has a value")
                table.set(tensor, number * 10_000 + k)
            wrong.extend("another's value" for t in mine if table.get(t) != number * 10_000 + k)
            if (table.get(shared) or 0) >= 0:
                wrong.append("the shared value is gone")
            table.set(shared, -1 - number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(table) == 1


def test_fake_tensors() -> None:
    with FakeTensorMode():
        index, carrier = torch.empty(7, dtype=torch.int64), torch.empty(3, 5, 0)
        made = torch.ops.gnncompile.sized(index, carrier)
        then = torch.ops.gnncompile.sorted_index(made)
        assert [torch.ops.gnncompile.num_segments(t) for t in (made, then)] == [3, 3]
        assert [torch.ops.gnncompile.longest_segment(t) for t in (made, then)] == [5, 5]
    found = segment._facts.get(made), segment._facts.get(then)
    assert found[0] == found[1] and segment._facts.get(index) is None


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return global_add_pool(self.layer(x), batch)


def test_what_a_capture_knows_is_freed_with_it() -> None:
    """The sizes in the table refer to torch's environment of shapes, which must not lead back to the fake tensors."""
    gc.collect()
    before = len(segment._facts)
    model = gnncompile.compile(Pool(), options={"inductor": False})
    model(torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 1, 2])).sum().backward()
    assert len(segment._facts) > before
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(segment._facts) <= before
