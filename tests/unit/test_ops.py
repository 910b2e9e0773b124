"""Every op that we register keeps torch's rules for ops: schema, fake results, gradients (``torch.library.opcheck``).

The ops of regions and layouts with more arguments: tests/kernels/test_vjp.py, tests/kernels/test_dropout.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import gnncompile  # noqa: F401  (registers the ops)
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Space
from gnncompile.ops import opaque
from tests.graphs import EDGE_LISTS, layout

OPS = torch.ops.gnncompile
FEW = ("test_schema", "test_faketensor")
"""What can be asked of ops without a gradient of their own, and of those that stand in captured graphs alone."""

EDGES = EDGE_LISTS["unsorted, duplicates, hub"]
COUNT = EDGES.size(1)
ALIVE = torch.arange(COUNT) % 3 > 0
WALK = layout(EDGES[1], EDGES[0], 5)


def randn(*size: int, wanted: bool = False) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_(wanted)


def region() -> str:
    b = Builder(Space.DESTINATION)
    return b.finish([Output(b.reduce("sum", b.input(0, Space.SOURCE, (1, 3), "float32")), "float32", (3,))]).spec


def arithmetic() -> str:
    b = Builder(Space.DESTINATION)
    one, other = (b.input(k, Space.DESTINATION, (1, 3), "float32") for k in (0, 1))
    return b.finish([Output(b.op("mul", one, b.op("tanh", other)), "float32", (3,))]).spec


def distances() -> str:
    return opaque._described("distances", ())


CASES: dict[str, tuple[tuple[Any, ...], tuple[str, ...] | None]] = {
    "region": (([randn(5, 3, wanted=True)], [*WALK, *layout(EDGES[0], EDGES[1], 5)], region()), None),
    "region_kernel": (([randn(5, 3)], list(WALK), region()), None),
    "csr": ((EDGES[1], EDGES[0], 5, 5, ALIVE), None),
    "csr_with_loops": ((*WALK, EDGES[1], ALIVE), None),
    "inverse_degree": ((WALK.rowptr, "float64"), None),
    "add_product": ((randn(4, 3), randn(4, 2), randn(2, 3)), None),
    "product": ((randn(4, 2), randn(2, 3), randn(3), randn(4, 3), True, False), None),
    "sum_of_products": (
        (randn(4, 2), randn(2, 3), randn(4, 5), randn(5, 3), randn(3), randn(4, 3), True, False),
        None,
    ),
    "products_of_same_rows": ((randn(4, 2), [randn(2, 3), randn(2, 3)], [randn(3), randn(3)]), None),
    "product_over_rows": ((randn(4, 2), randn(4, 3)), None),
    "product_and_sums_over_rows": ((randn(4, 2), randn(4, 3)), None),
    "two_products_over_rows": ((randn(4, 2), randn(4, 3), True, randn(4, 3), randn(4, 5), False), None),
    "product_with_epilogue": (
        (randn(4, 2), randn(2, 3), randn(4, 5), randn(5, 3), randn(3), True, False, [randn(4, 3)], arithmetic()),
        None,
    ),
    "products_over_rows": (([randn(4, 2)], [randn(4, 3), randn(4, 3)], [arithmetic()], [True]), None),
    "sums_over_rows": ((randn(4, 2), randn(3)), None),
    "matrix_copies": (([randn(4, 3), randn(2, 5)], [3, 4, 1, 3, 0, 2, 2, 5, 1, 3], torch.bfloat16), None),
    "var_mean_over_rows": ((randn(4, 3), 1), None),
    "opaque": (([randn(4, 3, wanted=True), randn(2, 3, wanted=True)], distances()), None),
    "opaque_backward": (([randn(4, 2)], [randn(4, 3), randn(2, 3)], [True, False], distances()), None),
    "embedding_gradient": ((randn(4, 3), torch.tensor([0, 2, 1, 2]), 5, 1, False), None),
    "seal": (([EDGES, *WALK, randn(3), ALIVE], [5, 7]), FEW),
    "stored": ((randn(4, 3, wanted=True),), None),
    "rounded": ((randn(4, 3, wanted=True),), None),
    "mark_dead": ((EDGES[0], ALIVE), FEW),
    "segment_reduce": ((randn(COUNT, 3), EDGES[1], 5, "max"), FEW),
    "segment_softmax": ((randn(COUNT, 3), EDGES[1], 5), FEW),
    "edge_dropout": ((randn(COUNT, 3), torch.tensor([3]), 0.5), FEW),
    "chosen_rows": ((EDGES[0], randn(5), randn(5)), FEW),
    "sized": ((EDGES[0], torch.empty(5, 0)), FEW),
    "laid_out": ((EDGES[0], EDGES[1], list(WALK)), FEW),
    "hop_prefix": ((EDGES[0], EDGES[1], torch.empty(2, 0), torch.empty(5, 0), list(EDGES)), FEW),
    "partitioned": ((EDGES[0], EDGES[1], torch.tensor([1]), torch.empty(2, 0), "group"), FEW),
    "padded": ((randn(5, 3), torch.tensor([5, 9]), 0, -1), FEW),
    "sorted_index": ((EDGES[1].sort().values,), FEW),
    "negative_targets": ((EDGES, 5, True), FEW),
    "random_permutation": ((5, torch.int64, torch.device("cpu")), FEW),
}
OF_DATA: dict[str, tuple[tuple[Any, ...], tuple[str, ...] | None]] = {
    "num_segments": ((EDGES[1],), None),
    "longest_segment": ((EDGES[1],), None),
    "live_edges": ((EDGES, ALIVE), None),
    "dropped_edges": ((EDGES, 0.5), FEW),
    "negative_edges": ((EDGES, 5, 1.0, False, None), FEW),
    "other_edges": ((EDGES, 5, 6, "sparse", False), FEW),
    "matched_edges": ((EDGES, randn(COUNT), 5), None),
    "components": ((EDGES, ALIVE, 5), None),
}
"""Ops whose sizes only the data knows; those that draw give something else each time."""

EXCHANGES = {"halo_exchange", "halo_return", "all_reduce", "count_rows", "sum_gradients"}
EXCHANGES |= {
    "exchange_start",
    "exchange_order",
    "exchange_wait",
    "return_start",
    "return_wait",
    "halo_rows",
    "own_rows",
    "own_edges",
    "halo_edges",
}
"""Ops that run in several processes at once: tests/partitioned.py."""

PACKAGED = {"launch", "nonempty", "bounded", "same_or_empty", "same_sizes", "sorted_edges", "with_hubs"}
"""Ops of programs that are traced for packages on GPUs: tests/e2e/test_package_gpu.py."""

NOT_HERE = {"refined_colors", "prepare_sizes", "adjacency", "gradient", "nested", *EXCHANGES, *PACKAGED}
"""The first needs a layer of the user's (tests/e2e/test_odd_layers.py). The second has a lowering only
(tests/unit/test_inductor_guards.py). The others are never run. They stand for a
sparse matrix, for a gradient and for a nested graph until a pass has replaced them (tests/e2e/test_sparse_made.py,
tests/e2e/test_forces.py, tests/e2e/test_nested_graphs.py).
"""


def registered() -> set[str]:
    return {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("gnncompile::")
    }


def test_every_op_is_here():
    assert registered() == CASES.keys() | OF_DATA.keys() | NOT_HERE


@pytest.mark.parametrize("name", [*CASES, *OF_DATA])
def test_op(name: str, device: str):
    arguments, tests = pytree.tree_map_only(Tensor, lambda t: moved(t, device), (CASES | OF_DATA)[name])
    some = {} if tests is None else {"test_utils": tests}
    torch.manual_seed(0)
    torch.library.opcheck(getattr(OPS, name).default, arguments, **some)


def moved(tensor: Tensor, device: str) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)
