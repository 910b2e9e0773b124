"""Inductor reads what our calls write only after they have written it, and nothing reads what was never written.

Every op of ours that Inductor lowers to a call has a case here. A loop that reads the result is fused with one of
another shape. There Inductor's code for the CPU forgets in what order written buffers are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch_geometric.utils import scatter

import gnncompile
from gnncompile._compat import inductor_call
from gnncompile.capture.backend import prepare_torch
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Space

OPS = torch.ops.gnncompile
ROWS, COLUMNS, DEPTH = 40, 8, 12

Operands = dict[str, Tensor]


def _region(t: Operands) -> Tensor:
    return scatter(t["rows"][t["index"].flip(0)] * t["total"], t["index"], 0, ROWS, "sum")


def _gated() -> str:
    b = Builder(Space.DESTINATION)
    product, gate = (b.input(k, Space.DESTINATION, (1, COLUMNS), "float32") for k in (0, 1))
    outs = product, b.op("mul", product, b.op("sigmoid", gate))
    return b.finish([Output(out, "float32", (COLUMNS,)) for out in outs]).spec


def _factor() -> str:
    b = Builder(Space.DESTINATION)
    one, other = (b.input(k, Space.DESTINATION, (1, COLUMNS), "float32") for k in (0, 1))
    return b.finish([Output(b.op("mul", one, b.op("tanh", other)), "float32", (COLUMNS,))]).spec


GATED, FACTOR = _gated(), _factor()

CASES: dict[str, Callable[[Operands], Tensor]] = {
    "region_kernel": _region,
    "add_product": lambda t: OPS.add_product(t["total"] * 2, t["left"], t["right"]),
    "product": lambda t: OPS.product(t["left"], t["right"], None, None, True, False),
    "product, in place": lambda t: OPS.product(t["left"], t["right"], t["total"] * 3, t["rows"], False, True),
    "sum_of_products": lambda t: OPS.sum_of_products(
        t["left"], t["right"], t["left"] + 1, t["right"], None, None, False, False
    ),
    "sum_of_products, in place": lambda t: OPS.sum_of_products(
        t["left"], t["right"], t["left"] + 1, t["right"], t["total"] * 4, None, False, True
    ),
    "products_of_same_rows": lambda t: OPS.products_of_same_rows(
        t["left"], [t["right"], t["right"]], [t["row"], t["row"] * 2]
    )[1],
    "product_over_rows": lambda t: OPS.product_over_rows(t["wide"], t["left"]),
    "product_and_sums_over_rows": lambda t: OPS.product_and_sums_over_rows(t["wide"], t["left"])[0],
    "two_products_over_rows": lambda t: OPS.two_products_over_rows(
        t["wide"], t["left"], True, t["wide"] + 1, t["left"], False
    )[2],
    "product_with_epilogue": lambda t: OPS.product_with_epilogue(
        t["left"], t["right"], None, None, t["row"] * 2, False, False, [t["rows"] * 3], GATED
    )[1],
    "product_with_epilogue, in place": lambda t: OPS.product_with_epilogue(
        t["left"], t["right"], t["left"] + 1, t["right"], t["total"] * 5, False, True, [t["rows"]], GATED
    )[0],
    "products_over_rows": lambda t: OPS.products_over_rows(
        [t["wide"], t["wide"] + 2], [t["rows"] * 2, t["total"], t["left"]], [FACTOR, ""], [False, True]
    )[0],
    "matrix_copies": lambda t: OPS.matrix_copies(
        [t["total"] * 2, t["right"]], [ROWS, COLUMNS, COLUMNS, 1, 0, COLUMNS, DEPTH, 1, COLUMNS, 0], torch.float32
    )[0],
    "var_mean_over_rows": lambda t: OPS.var_mean_over_rows(t["rows"] * 2, 0)[1] + t["rows"],
    "sums_over_rows": lambda t: OPS.sums_over_rows(t["rows"], t["left"]) + t["rows"],
}

WITH_OTHERS = {"exchange_start", "exchange_order", "exchange_wait", "return_start", "return_wait"}
WITH_OTHERS |= {"halo_rows", "own_rows", "own_edges", "halo_edges"}
"""Ops that run in several processes at once. The check "poisoned" of tests/partitioned.py has their cases."""


def _operands(device: str) -> Operands:
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    return {
        "left": made(ROWS, DEPTH),
        "right": made(DEPTH, COLUMNS),
        "total": made(ROWS, COLUMNS),
        "rows": made(ROWS, COLUMNS),
        "row": made(COLUMNS),
        "wide": made(ROWS, ROWS),
        "index": torch.randint(ROWS, (ROWS,), generator=generator).to(device),
    }


def _cases(device: torch.device) -> list[str]:
    """The cases of a device. Triton runs on a CPU only where it is interpreted."""
    on_gpu_alone = {"matrix_copies", "var_mean_over_rows"} if torch.cuda.is_available() else set()
    return [name for name in CASES if device.type != "cpu" or name not in on_gpu_alone]


def _all_cases(t: Operands) -> list[tuple[Tensor, ...]]:
    """For each case what reads its result: two loops of different shapes, which share what they read, and a sum."""
    found = []
    for name in _cases(t["rows"].device):
        made = CASES[name](t)
        gate = t["rows" if made.size(1) == COLUMNS else "left"].tanh() * len(found)
        scattered = torch.zeros_like(gate).index_add(0, t["index"], gate)
        found.append((made - gate, scattered, made.tanh().sum(0)))
    return found


def test_every_op_that_writes_has_a_case():
    prepare_torch()  # registers the lowerings, once in a process
    # Their calls are in packages: tests/e2e/test_package.py, test_package_gpu.py.
    in_packages = {"bounded", "csr", "csr_with_loops", "seal", "launch", "nonempty", "same_sizes", "sorted_edges"}
    lowered = {str(op).split(".")[1] for op in inductor_call.installed} - in_packages - WITH_OTHERS
    assert lowered == {case.split(",")[0] for case in CASES}


def poison_memory(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Memory that Inductor's code allocates holds NaN."""
    name = f"_empty_strided_{device}"
    allocate = getattr(torch._C._dynamo.guards, name)

    def poisoned(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made: Tensor = allocate(size, stride, dtype)
        return made.fill_(torch.nan if dtype.is_floating_point else 1)

    monkeypatch.setattr(torch._C._dynamo.guards, name, poisoned)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    torch._dynamo.reset()
    poison_memory(monkeypatch, device)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def test_readers_come_after_the_call(device: str, poison: None):
    operands = _operands(device)
    found, (code,) = run_and_get_code(gnncompile.compile(_all_cases), operands)
    for case, ours, torchs in zip(_cases(torch.device(device)), found, _all_cases(operands), strict=True):
        for a, b in zip(ours, torchs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, case=case: f"{case}: {text}")
    _check_order(code)


def test_readers_of_a_gradient_per_edge_come_after_its_region(device: str, poison: None):
    """The gradient of an edge value that feeds a sum, and leaves on its own."""

    def layer(x: Tensor, w: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, destination = edge_index
        return scatter(w * x[source], destination, 0, ROWS, "sum"), (x[destination] - w).relu()

    t = _operands(device)
    edge_index = torch.stack([t["index"].flip(0), t["index"]])
    results = []
    for run in (layer, gnncompile.compile(layer)):
        leaves = [t["rows"].clone().requires_grad_(), t["total"].clone().requires_grad_()]

        def step(run=run, leaves=leaves) -> list[Tensor]:
            outs = run(*leaves, edge_index)
            return [*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), leaves)]

        found, codes = run_and_get_code(step)
        results.append(found)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(codes) == 2
    for code in codes:
        _check_order(code)


_OUR_CALL = re.compile(r"(?:region_[0-9a-f]+_\w+|copies_[0-9a-f]+|_gnncompile_gemm\.write_\w+)\((.*)\)$")
_MADE = re.compile(r"(buf\d+) = (?:empty_strided_\w+|assert|buf\d+|reinterpret_tensor)")


def _check_order(code: str) -> None:
    """In generated code nothing stands between where a buffer is allocated and our call that fills it but other
    allocations, and calls that do not name the buffer.
    """
    lines = [line.strip() for line in code.splitlines()]
    ours = [at for at, line in enumerate(lines) if _OUR_CALL.match(line) or "extern_kernels.addmm" in line]
    assert ours
    for at in ours:
        call = _OUR_CALL.match(lines[at])
        if call is None:
            continue
        inside = call[1]
        filled = re.findall(r"buf\d+", inside.rsplit("(", 1)[-1] if lines[at].startswith("region_") else "")
        for name in filled:
            before = [line for line in lines[:at] if re.search(rf"\b{name}\b", line)]
            assert all(_MADE.match(line) or line == f"{name}.zero_()" for line in before), (name, before)
            assert before, f"{name} is not allocated"


def test_what_others_read_is_not_written_to(device: str, poison: None):
    """A matrix with another reader, an input, and views and copies of one that Inductor leaves out."""

    def program(t: Operands) -> tuple[Tensor, ...]:
        total = t["total"] * 2
        turned = (total + 1).view(COLUMNS, ROWS)
        added = [
            OPS.add_product(m, t["left"], t["right"]) for m in (total, t["total"].clone(), turned.view(-1, COLUMNS))
        ]
        return *added, total.tanh().sum(0), turned * 2, t["total"] + 1

    t = _operands(device)
    given = t["total"].clone()
    for a, b in zip(gnncompile.compile(program)(t), program(t), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(given, t["total"])
