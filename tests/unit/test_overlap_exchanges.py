"""Work that does not need the rows of an exchange runs between its start and its end, and no other work moves."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output
from gnncompile.passes.post_grad import order_exchanges, overlap_exchanges, walk_own_edges_first
from tests.triton_regions import D, S, attention_gradient, max_and_min, neighbour_sum

OPS, ATEN = torch.ops.gnncompile, torch.ops.aten
ROWS, HALO, SENT, COLUMNS = 5, 2, 3, 4


class Graph:
    """A graph whose nodes have real tensors as values."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, *size: int) -> fx.Node:
        """Adds an input. All inputs come before the calls, as in captured graphs."""
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        if first is None:
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_before(first):
                node = self.graph.placeholder(name)
        node.meta["val"] = torch.zeros(size)
        return node

    def call(self, target: Any, size: tuple[int, ...], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.zeros(size)
        return node

    def returned(self, x: fx.Node, name: str) -> fx.Node:
        send, halo = self.input(f"send_{name}", SENT), self.input(f"halo_{name}", HALO, 0)
        return self.call(OPS.halo_return.default, (ROWS, COLUMNS), x, send, halo, "0", [])

    def run(self, *results: fx.Node) -> list[str]:
        """Runs the passes. Returns the names of the calls in their order."""
        self.graph.output(results)
        order_exchanges.run(self.graph)
        overlap_exchanges.run(self.graph)
        walk_own_edges_first.run(self.graph)
        self.graph.lint()
        calls = [n for n in self.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        return [str(n.target).split(".")[-2] for n in calls]


def _backward(region: Any, reader: Any = None) -> list[str]:
    made = Graph()
    x, weight = made.input("x", ROWS, COLUMNS), made.input("weight", COLUMNS, COLUMNS)
    call = made.graph.call_function(OPS.region.default, ([x], [x, x, x], region.spec))
    dy = made.call(operator.getitem, (ROWS + HALO, COLUMNS), call, 0)
    back = made.returned(dy, "one")
    needs = made.call(ATEN.mm.default, (ROWS, COLUMNS), back, weight)
    free = made.call(ATEN.mul.Tensor, (ROWS, COLUMNS), x, x)
    more = [] if reader is None else [made.call(reader, (ROWS + HALO, COLUMNS), dy)]
    return made.run(needs, free, *more)


def test_halo_rows_leave_first() -> None:
    found = _backward(neighbour_sum(S, "float32", 1, COLUMNS))
    assert found == ["halo_rows", "return_start", "own_rows", "mul", "return_wait", "mm"]


def test_regions_that_others_read_run_at_once() -> None:
    found = _backward(neighbour_sum(S, "float32", 1, COLUMNS), ATEN.relu.default)
    assert found == ["region", "return_start", "mul", "relu", "return_wait", "mm"]
    found = _backward(attention_gradient(S, "float32", 1, COLUMNS))  # it has values per edge
    assert found == ["region", "return_start", "mul", "return_wait", "mm"]


@pytest.mark.parametrize("read", [(1, 0), (1,)])
def test_own_rows_take_all_outputs_in_their_order(read: tuple[int, ...]) -> None:
    made, region = Graph(), neighbour_sum(S, "float32", 1, COLUMNS)
    spec = replace(region, outputs=region.outputs * 2).spec
    x, send, halo = made.input("x", ROWS, COLUMNS), made.input("send", SENT), made.input("halo", HALO, 0)
    call = made.graph.call_function(OPS.region.default, ([x], [x, x, x], spec))
    gradients = [made.call(operator.getitem, (ROWS + HALO, COLUMNS), call, k) for k in read]
    backs = [made.call(OPS.halo_return.default, (ROWS, COLUMNS), g, send, halo, "0", []) for g in gradients]
    found = made.run(*backs)
    own = made.graph.find_nodes(op="call_function", target=OPS.own_rows.default)
    assert [[out.args[1] for out in node.args[0]] for node in own] == ([[0, 1]] if len(read) == 2 else [])  # type: ignore[union-attr]
    assert found[0] == ("halo_rows" if own else "region")


def test_regions_with_several_rows_per_node_run_at_once() -> None:
    made = Graph()
    x, spec = made.input("x", ROWS, 2), neighbour_sum(S, "float32", 1, 2).spec
    call = made.graph.call_function(OPS.region.default, ([x], [x, x, x], spec))
    dy = made.call(operator.getitem, (2 * (ROWS + HALO), 2), call, 0)
    back = made.returned(made.call(ATEN.view.default, (ROWS + HALO, 4), dy, [-1, 4]), "one")
    assert made.run(back) == ["region", "view", "return_start", "return_wait"]


def test_exchanges_keep_their_order_without_keeping_rows() -> None:
    made = Graph()
    first = made.returned(made.input("x", ROWS + HALO, COLUMNS), "one")
    second = made.returned(made.input("y", ROWS + HALO, COLUMNS), "two")
    assert made.run(first, second) == ["return_start", "exchange_order", "return_start", *["return_wait"] * 2]
    (order,) = made.graph.find_nodes(op="call_function", target=OPS.exchange_order.default)
    assert [user.target for user in order.users] == [OPS.return_start.default]


def test_work_stays_before_writes_and_before_the_next_exchange() -> None:
    made = Graph()
    first = made.returned(made.input("x", ROWS + HALO, COLUMNS), "one")
    joined = made.call(ATEN.cat.default, (ROWS + HALO, COLUMNS), [first, first])
    second = made.returned(joined, "two")
    late = made.call(ATEN.mul.Tensor, (ROWS, COLUMNS), made.input("w", ROWS, COLUMNS), 2)
    found = made.run(second, late)
    # The product overlaps with the second exchange, which needs the rows of the first.
    assert found == ["return_start", "exchange_order", "return_wait", "cat", "return_start", "mul", "return_wait"]


def _forward(region: Any, view: bool = False, late: bool = False, halos: int = 1) -> list[str]:
    """A region that reads exchanged rows, of one or two exchanges."""
    made = Graph()
    x, send = made.input("x", ROWS, COLUMNS), made.input("send", SENT)
    plans = [made.input(f"halo_{k}", HALO, 0) for k in range(halos)]
    arrived = [made.call(OPS.halo_exchange.default, (ROWS + HALO, COLUMNS), x, send, one, "0", []) for one in plans]
    if view:
        sizes = (ROWS + HALO, 1, COLUMNS)
        arrived = [made.call(ATEN.view.default, sizes, one, list(sizes)) for one in arrived]
    more = [made.call(ATEN.relu.default, (ROWS + HALO, COLUMNS), arrived[0])] if late else []
    call = made.graph.call_function(OPS.region.default, ([*arrived, *more], [x, x, x], region.spec))
    result = made.call(operator.getitem, (ROWS, COLUMNS), call, 0)
    return made.run(made.call(ATEN.mul.Tensor, (ROWS, COLUMNS), result, result))


def test_edges_from_own_rows_are_walked_first() -> None:
    region = neighbour_sum(D, "float32", 1, COLUMNS)
    assert _forward(region) == ["exchange_start", "own_edges", "exchange_wait", "halo_edges", "mul"]
    found = ["exchange_start", "view", "own_edges", "exchange_wait", "view", "halo_edges", "mul"]
    assert _forward(region, view=True) == found


def test_some_regions_wait_for_all_rows() -> None:
    found = ["exchange_start", "exchange_wait", "region", "mul"]
    assert _forward(max_and_min(D, "float32", 1, COLUMNS)) == found  # a maximum of all edges
    region = neighbour_sum(D, "float32", 1, COLUMNS)
    late = ["exchange_start", "exchange_wait", "relu", "region", "mul"]
    assert _forward(region, late=True) == late  # it also reads what is computed from the rows
    assert _forward(neighbour_sum(S, "float32", 1, COLUMNS))[1] == "own_edges"
    b = Builder(D)
    row = b.on_edges(b.input(0, D, (1, COLUMNS), "float32"))
    of_rows = b.finish([Output(b.reduce("sum", row), "float32", (COLUMNS,))])
    assert _forward(of_rows) == found  # it reads exchanged rows as its own: edges do not tell which
    assert "own_edges" not in _forward(region, halos=2)  # the own rows of one exchange, the halo of another
