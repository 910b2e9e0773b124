"""The backward reads own rows from the exchanged rows that it keeps, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile.passes.analysis import gradients_in
from gnncompile.passes.joint import share_exchanged_rows

OPS, ATEN = torch.ops.gnncompile, torch.ops.aten
OWN, HALO, COLUMNS = 5, 2, 4

Forward = Callable[[Tensor, Tensor], Tensor]
"""Makes the result of own rows and of exchanged rows."""


def traced(
    forward: Forward, own: Callable[[Tensor], Tensor] = lambda x: x.relu(), num_own: int = OWN
) -> fx.GraphModule:
    """The graph of a forward and its backward: x, send, halo, and a gradient; the gradient of x."""

    def both(x: Tensor, send: Tensor, halo: Tensor, tangents_1: Tensor) -> Tensor:
        rows = own(x)
        out = forward(rows, OPS.halo_exchange(rows, send, halo, "0", []))
        return torch.autograd.grad(out, x, tangents_1)[0]

    x, send = torch.randn(num_own, COLUMNS, requires_grad=True), torch.tensor([0, 2])
    halo, gradient = torch.empty(HALO, 0, dtype=torch.int8), torch.randn(num_own + HALO, COLUMNS)
    made = make_fx(both, tracing_mode="symbolic")(x, send, halo, gradient)
    for node, name in zip(made.graph.find_nodes(op="placeholder"), ("x", "send", "halo", "tangents_1"), strict=True):
        node.name = name
    return made


class Alone(fx.Interpreter):
    """Runs a graph in one process: the first own rows arrive as halo rows."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Exchanges within the process; runs other operations as they are."""
        if target is OPS.halo_exchange.default:
            return torch.cat([args[0], args[0][:HALO]])
        if target is OPS.halo_return.default:
            gradient = args[0][:OWN].clone()
            gradient[:HALO] += args[0][OWN:]
            return gradient
        return super().call_function(target, args, kwargs)


def changed(made: fx.GraphModule) -> bool:
    """Runs the pass; the gradient stays the same. Returns whether a node reads the front of exchanged rows."""
    given = torch.randn(OWN, COLUMNS), torch.tensor([0, 2]), torch.empty(HALO, 0), torch.randn(OWN + HALO, COLUMNS)
    wanted = Alone(made).run(*given)
    share_exchanged_rows.run(made.graph)
    made.graph.lint()
    torch.testing.assert_close(Alone(made).run(*given), wanted, rtol=0, atol=0)
    return bool(made.graph.find_nodes(op="call_function", target=ATEN.slice.Tensor))


def read_late(made: fx.GraphModule) -> set[Any]:
    """The operations of the forward whose results the backward reads, also through views."""
    late = gradients_in(made.graph)
    found = set()
    for read in (read for node in late for read in node.all_input_nodes if read not in late):
        while read.target in (ATEN.view.default, ATEN.slice.Tensor, ATEN.detach.default):
            read = read.all_input_nodes[0]
        found.add(read.target)
    return found


def test_the_backward_reads_exchanged_rows() -> None:
    made = traced(lambda rows, joined: joined * joined + (rows * rows).sum())
    assert ATEN.relu.default in read_late(made)
    assert changed(made)
    assert ATEN.relu.default not in read_late(made) and OPS.halo_exchange.default in read_late(made)


def test_views_of_rows_are_read_from_exchanged_rows() -> None:
    def heads(rows: Tensor, joined: Tensor) -> Tensor:
        found, more = joined.view(-1, 2, COLUMNS // 2), rows.view(-1, 2, COLUMNS // 2)
        return (found * found).view(-1, COLUMNS) + (more * more).sum()

    made = traced(heads)
    assert changed(made) and ATEN.relu.default not in read_late(made)
    made = traced(
        lambda rows, joined: joined * joined + (rows.view(-1, 1) * rows.view(-1, 1)).sum()
    )  # no view of each row
    assert changed(made) and ATEN.relu.default in read_late(made)


def test_rows_are_kept_where_no_exchanged_rows_are() -> None:
    made = traced(lambda rows, joined: joined + (rows * rows).sum())
    assert not changed(made) and ATEN.relu.default in read_late(made)


def test_a_matrix_that_only_the_backward_reads_is_made_of_exchanged_rows() -> None:
    made = traced(lambda rows, joined: joined * joined + (rows @ rows.t()).sum())
    assert changed(made) and ATEN.relu.default not in read_late(made)


def test_exchanges_of_checkpoints_stay_what_they_are() -> None:
    made = traced(lambda rows, joined: joined + (rows * rows).sum(), num_own=5 * HALO)
    (exchange,) = made.graph.find_nodes(op="call_function", target=OPS.halo_exchange.default)
    exchange.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert not changed(made)


def test_results_are_kept_anyway() -> None:
    made = traced(lambda rows, joined: joined + (rows * rows).sum(), num_own=5 * HALO)
    (relu,) = made.graph.find_nodes(op="call_function", target=ATEN.relu.default)
    output = made.graph.output_node()
    output.args = ((output.args[0], relu),)
    share_exchanged_rows.run(made.graph)
    assert ATEN.relu.default in read_late(made)


def test_exchanged_rows_are_kept_where_few_rows_arrive() -> None:
    made = traced(lambda rows, joined: joined + (rows * rows).sum(), num_own=5 * HALO)
    assert changed(made) and ATEN.relu.default not in read_late(made)


def test_inputs_stay_what_they_are() -> None:
    assert not changed(traced(lambda rows, joined: joined * joined + (rows * rows).sum(), own=lambda x: x))
