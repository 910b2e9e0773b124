"""The recipe "How to add a reduction" of docs/contributing.md: one row of the table, and all generators have it.

The row is added in a process of its own, before anything reads the table, as it would stand in the file.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from gnncompile.ir.reductions import REDUCTIONS, Reduction

product = Reduction("product", "prod", "1.0", "product", "{0} * {1}", "T(1)", "{0} * {1}", None)
REDUCTIONS[product.op] = product

import os
import torch
from tests import triton_regions
from gnncompile.codegen.cpp.kernel import CppKernel
from gnncompile.codegen.triton import tile
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import run
from gnncompile.ir.region import Output, Space
from gnncompile.ir.verify import verify

def products(by, heads, channels):
    b = Builder(by)
    x, w = b.input(0, by.opposite, (heads, channels), "float32"), b.input(1, Space.EDGE, (heads, 1), "float32")
    return b.finish([Output(b.reduce("product", b.op("mul", x, w)), "float32", (heads, channels))])

for by in (Space.DESTINATION, Space.SOURCE):
    for heads, channels in ((1, 5), (2, 80)):
        region = products(by, heads, channels)
        verify(region)
        for name, graph in triton_regions.GRAPHS.items():
            tensors = triton_regions.random_tensors(region, graph)
            expected = run(triton_regions.in_double(region), [t.double() for t in tensors], graph.layout("cpu"))
            triton_regions.check(region, graph, triton_regions.DEVICE)
            outputs = triton_regions.poisoned(region, graph, "cpu")
            CppKernel(region)(tensors, graph.layout("cpu"), outputs)
            torch.testing.assert_close(outputs[0].double(), expected[0], rtol=1e-5, atol=1e-5)
            empty = torch.bincount(graph.row[graph.alive] if graph.alive is not None else graph.row,
                                   minlength=graph.num_rows) == 0
            assert (outputs[0][empty] == 0).all()
print("right")
"""


def test_a_row_of_the_table_is_a_reduction_of_all_generators():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr
