"""Times products of node rows in 16 bits: our kernels and the library's, on a GPU.

Both are checked against float64 before they are timed. Under Triton's interpreter (`TRITON_INTERPRET=1`) this also runs
on a CPU, but the times mean nothing there.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.commands import driver
from benchmarks.measuring import measure
from benchmarks.reporting import tables

NAME = "products"
HELP = "products of rows in 16 bits, ours and the library's"

SHAPES = "10000x64x64,100000x64x64,600000x64x64,30000x128x128,100000x128x128,100000x256x256"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-2
"""The largest norm of the difference from float64, relative to the norm of the result."""

Written = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the matrices of one case, `[rows, depth]` and `[depth, columns]`, and their dtype's name."""

    rows: int
    depth: int
    columns: int
    dtype: str

    @property
    def name(self) -> str:
        """The sizes and the dtype."""
        return f"{self.rows}x{self.depth}x{self.columns} {self.dtype}"

    @property
    def label(self) -> str:
        """The name, which differs from those of all other cases."""
        return self.name

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {self.depth} -> {self.columns} columns, {self.dtype}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=0.2, rounds=5)
    driver.add_budget(parser)
    parser.add_argument(
        "--shapes", default=SHAPES, help="rows x depth x columns, comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--dtypes", default="bf16", help=f"comma-separated, of {', '.join(DTYPES)} (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a product is wrong."""
    device, how, budget = driver.device_of_triton(args), driver.options(args), driver.Budget(args.budget)
    shapes = [_shape(text, dtype) for text in args.shapes.split(",") for dtype in args.dtypes.split(",")]

    def measure_shape(shape: Shape, progress: driver.Progress) -> tuple[str, driver.Records]:
        progress("products")
        records = measure_products(shape, device, how.seconds, how.rounds)
        return format_shape(records), records

    return driver.run(args, f"products-{device.type}", shapes, measure_shape, budget=budget)


def _shape(text: str, dtype: str) -> Shape:
    rows, depth, columns = map(int, text.split("x"))
    return Shape(rows, depth, columns, dtype)


def measure_products(shape: Shape, device: torch.device, seconds: float, rounds: int) -> driver.Records:
    """Checks and times each product of a shape, ours beside the library's."""
    records: driver.Records = []
    for product, (ours, library, expected) in _calls(shape, device).items():
        calls = {"ours": ours, "library": library}
        errors = {name: _error(call(), expected) for name, call in calls.items()}
        time = measure.queued if device.type == "cuda" else measure.interleaved
        for name, timing in time(calls, device, seconds, rounds).items():
            records.append(
                {
                    "shape": shape.name,
                    "product": product,
                    "row": name,
                    "ours": name == "ours",
                    "status": "ok" if errors[name] <= TOLERANCE else "WRONG",
                    "us": 1e3 * timing.median,
                    "error": errors[name],
                }
            )
    return records


class _Matrices:
    """The matrices of a case, and memory for results."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        dtype, generator = DTYPES[shape.dtype], torch.Generator().manual_seed(0)

        def made(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        self.rows, self.grads = made(shape.rows, shape.depth), [made(shape.rows, shape.columns) for _ in range(2)]
        self.weights = [made(shape.columns, shape.depth) / shape.depth**0.5 for _ in range(4)]
        self.biases = [made(shape.columns) for _ in range(4)]
        self.outs, self.dx = [torch.empty_like(self.grads[0]) for _ in range(4)], torch.empty_like(self.rows)
        self.dw = [torch.empty_like(weight) for weight in self.weights]
        self.db = [torch.empty_like(bias) for bias in self.biases]


Calls = tuple[Callable[[], Written], Callable[[], Written], Written]
"""Our call, the library's, and the results in float64."""


def _calls(shape: Shape, device: torch.device) -> dict[str, Calls]:
    """Returns the calls of each kind of product."""
    given = _Matrices(shape, device)
    return {
        "one layer": _layers(given, 1),
        "two layers of the same rows": _layers(given, 2),
        "four layers of the same rows": _layers(given, 4),
        "gradient of the rows of two layers": _of_rows(given),
        "gradients of a weight and a bias": _of_weights(given, 1),
        "gradients of two weights and biases": _of_weights(given, 2),
    }


# Kernels are imported in functions, because Triton's interpreter must be chosen before Triton is imported.


def _layers(given: _Matrices, count: int) -> Calls:
    from gnncompile.codegen.gemm import launch

    rights, biases, outs = [w.t() for w in given.weights[:count]], given.biases[:count], given.outs[:count]
    names = [f"out{k}" for k in range(count)]

    def ours() -> Written:
        launch.side_by_side(given.rows, rights, biases, outs)
        return dict(zip(names, outs, strict=True))

    def library() -> Written:
        for bias, right, out in zip(biases, rights, outs, strict=True):
            torch.addmm(bias, given.rows, right, out=out)
        return dict(zip(names, outs, strict=True))

    exact = [given.rows.double() @ r.double() + b.double() for r, b in zip(rights, biases, strict=True)]
    return ours, library, dict(zip(names, exact, strict=True))


def _of_rows(given: _Matrices) -> Calls:
    from gnncompile.codegen.gemm import launch

    (one, other), (first, second, *_), dx = given.grads, given.weights, given.dx

    def ours() -> Written:
        launch.by_rows((one, first), (other, second), None, None, False, dx)
        return {"dx": dx}

    def library() -> Written:
        torch.mm(one, first, out=dx)
        torch.addmm(dx, other, second, out=dx)
        return {"dx": dx}

    return ours, library, {"dx": one.double() @ first.double() + other.double() @ second.double()}


def _of_weights(given: _Matrices, count: int) -> Calls:
    from gnncompile.codegen.gemm import launch

    rows, grads = given.rows, given.grads[:count]
    written = {f"{name}{k}": many[k] for name, many in (("dw", given.dw), ("db", given.db)) for k in range(count)}

    def ours() -> Written:
        launch.over_rows(*(launch.OverRows(g, rows, given.dw[k], given.db[k]) for k, g in enumerate(grads)))
        return written

    def library() -> Written:
        for k, grad in enumerate(grads):
            torch.mm(grad.t(), rows, out=given.dw[k])
            torch.sum(grad, 0, out=given.db[k])
        return written

    exact = {f"dw{k}": grad.double().t() @ rows.double() for k, grad in enumerate(grads)}
    return ours, library, exact | {f"db{k}": grad.double().sum(0) for k, grad in enumerate(grads)}


def _error(found: Written, expected: Written) -> float:
    """Returns the largest relative error of the results; infinity for what is no number."""
    errors = [float((found[name].double() - exact).norm() / exact.norm()) for name, exact in expected.items()]
    return max(error if error == error else float("inf") for error in errors)


def format_shape(records: driver.Records) -> str:
    """Returns the table of one shape."""
    cells = []
    for ours, library in zip(records[::2], records[1::2], strict=True):
        ratio = library["us"] / ours["us"]
        times = [f"{one['us']:.1f}" if one["status"] == "ok" else one["status"] for one in (ours, library)]
        cells.append([ours["product"], *times, f"{ratio:.2f}", f"{ours['error']:.0e}"])
    return tables.text_table(["", "ours us", "library us", "x library", "error"], cells)
