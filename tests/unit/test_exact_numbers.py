"""Sums begin with a positive zero where Inductor would begin them with their first element."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, fx

from gnncompile.passes.analysis import aten
from gnncompile.passes.post_grad import exact_numbers
from tests.cuda_code import cuda_code


def _graph(columns: int, dtype: torch.dtype) -> fx.Graph:
    """Returns the graph of a sum over the features of a matrix on a CPU."""
    graph, x = fx.Graph(), torch.empty(5, columns, dtype=dtype)
    node = graph.placeholder("x")
    made = graph.call_function(aten.sum.dim_IntList, (node, [1]))
    node.meta["val"], made.meta["val"] = x, x.sum(1)
    graph.output(made)
    return graph


@pytest.mark.parametrize(
    ("columns", "dtype", "added"),
    [(4, torch.float32, 1), (1, torch.bfloat16, 1), (40, torch.float32, 0), (4, torch.int64, 0)],
)
def test_sums_that_are_written_out_in_cpp(columns: int, dtype: torch.dtype, added: int):
    graph = _graph(columns, dtype)
    exact_numbers.run(graph)
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=aten.add.Tensor)) == added


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/kernels/test_numbers.py runs on the GPU")
def test_sums_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    def total(x: Tensor) -> Tensor:
        return x.sum(1)

    exact = cuda_code(monkeypatch, total, 64, torch.float32, exact_numbers.run)
    usual = cuda_code(monkeypatch, total, 64, torch.float32, lambda graph: None)
    added = re.compile(r"= tmp\d+ \+ tmp\d+$", re.MULTILINE)
    assert added.search(exact.split("tl.sum")[0]) and not added.search(usual)
