"""What a model asks of sizes is answered as in eager for sizes of 0 too, whichever size comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import gnncompile
from gnncompile.support.case import Graph
from tests.harness import light


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


def _while(n: int) -> int:
    steps = 0
    while n > 0:
        n, steps = n - 10, steps + 1
    return steps


ASKED: dict[str, Callable[[int], float]] = {
    "max(n, 1)": lambda n: 1 / max(n, 1),
    "min(n, 1)": lambda n: min(n, 1),
    "max(1, min(n, 10))": lambda n: max(1, min(n, 10)),
    "max(n - 5, 0)": lambda n: max(n - 5, 0),
    "if n": lambda n: 2 if n else 1,
    "not n": lambda n: 2 if not n else 1,
    "n or 5": lambda n: n or 5,
    "0 < n": lambda n: 2 if 0 < n else 1,  # noqa: SIM300
    "n >= 1": lambda n: 2 if n >= 1 else 1,
    "0 == n": lambda n: 2 if 0 == n else 1,  # noqa: SIM300
    "bool(n)": lambda n: bool(n),
    "any": lambda n: 2 if any([n, 0]) else 1,
    "2 n == 0": lambda n: 2 if 2 * n == 0 else 1,
    "n // 2 == 0": lambda n: 2 if n // 2 == 0 else 1,
    "abs(n - 1)": lambda n: abs(n - 1),
    "n == 1": lambda n: 2 if n == 1 else 1,
    "n in": lambda n: 2 if n in (0, 40) else 1,
    "range": lambda n: sum(range(n)),
    "a list": lambda n: len([0] * n),
    "a dict": lambda n: {0: 3.0}.get(n, 2.0),
    "log": lambda n: math.log(n + 1),
    "while": _while,
}


@pytest.mark.parametrize("sizes", [((12, 40), (9, 23), (7, 0), (1, 1)), ((7, 0), (12, 40), (1, 1))])
@pytest.mark.parametrize("asked", ASKED)
def test_questions(asked: str, sizes: tuple[tuple[int, int], ...]):
    def fn(x: Tensor, edge_index: Tensor) -> Tensor:
        return x.sum() * ASKED[asked](edge_index.size(1))

    compiled = gnncompile.compile(fn, options={"inductor": False})
    for size in sizes:
        g = Graph(*size)
        torch.testing.assert_close(
            compiled(g.x, g.edge_index), fn(g.x, g.edge_index), msg=lambda m, s=size: f"{s}: {m}"
        )
