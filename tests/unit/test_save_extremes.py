"""Inputs of maxima are written to memory where a gradient is taken: a second computation may differ in the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, fx

import gnncompile
from tests.harness import light, look_at_graphs


def _centred(x: Tensor) -> Tensor:
    return x - 0.1 * x.mean(0, keepdim=True)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda y: y.amax(0),
    "minimum": lambda y: y.amin(1),
    "of all values": lambda y: y.max(),
    "infinity norm": lambda y: y.norm(math.inf, dim=1),
    "vector norm": lambda y: torch.linalg.vector_norm(y, math.inf),
}


def _stored(graph: fx.Graph) -> Iterable[str]:
    return [
        str(node.args[0]) for node in graph.find_nodes(op="call_function", target=torch.ops.gnncompile.stored.default)
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["inductor", "op by op"])
def test_gradients(case: str, engine: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    stored = look_at_graphs(monkeypatch, _stored)
    options = {"inductor": engine == "inductor"}
    compiled = gnncompile.compile(lambda x: CASES[case](_centred(x)), options=options)
    for rows in (40, 1, 7):
        x = torch.randn(rows, 4, device=device, requires_grad=True)
        out = compiled(x)
        out.sum().backward()
        expected = torch.autograd.grad(CASES[case](_centred(x)).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)
    assert len(stored) == 1


def test_nothing_is_stored_without_a_gradient_or_of_an_input(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = look_at_graphs(monkeypatch, _stored)
    with light():
        for run, wanted in ((lambda x: _centred(x).amax(0), False), (lambda x: x.amax(0), True)):
            x = torch.randn(40, 4, device=device, requires_grad=wanted)
            torch.testing.assert_close(gnncompile.compile(run)(x), run(x))
    assert not stored
