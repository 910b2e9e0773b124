"""Finds the stage at which a package for a GPU fails: ``python -m tests.package_stages [MODEL ...]``, as SAGE or GAT.

A wrong launch may end a process or hang, so each stage is a process of its own with a limit of time. A stage that fails
ends the run; if there are gdb and compute-sanitizer, they tell where it died. The stages, for each model:

- plain: AOTInductor of torch alone.
- traced: the traced program, whose kernels Triton launches.
- package: the package is written.
- load: the package is loaded, without gnncompile.
- run: calls of many sizes, compared with eager in float64.
- wrong: wrong inputs, each followed by a right call.
- kept: with ``KEEP_LAYOUT=1`` in the environment, calls with layouts that the caller keeps.
- times: p50 and p99 of the package, of the compiled model and of eager.

Where the check of the vector instructions takes long, ``TORCHINDUCTOR_VEC_ISA_OK=1`` leaves it out.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.package import load_package
from torch.utils._pytree import tree_leaves

Call = tuple[Tensor, ...]

SECONDS = 240
"""The time that a stage may take."""

KEEPS = os.environ.get("KEEP_LAYOUT") == "1"
"""Whether the packages also serve graphs whose layout the caller keeps."""


def model_of(name: str) -> tuple[nn.Module, Call, list[Call]]:
    """Returns a model, its example and further calls, on the GPU."""
    from tests.e2e.test_package import MODELS, SIZES, inputs_of, random_sizes
    from tests.e2e.test_package_models import hub

    torch.manual_seed(0)
    make, names = MODELS[name]
    calls = [inputs_of(names, size, seed) for seed, size in enumerate((*SIZES, *random_sizes(5)))]
    calls += [hub(inputs_of(names, size, 7)) for size in ((200, 600, 3), (5000, 100_000, 9))]
    given = [tuple(tensor.cuda() for tensor in call) for call in (inputs_of(names, (40, 160, 3)), *calls)]
    return make().eval().cuda(), given[0], given[1:]


def exact(model: nn.Module, call: Call) -> list[Tensor]:
    """Returns eager's results in float64."""
    with torch.no_grad():
        return tree_leaves(copy.deepcopy(model).double()(*(t.double() if t.is_floating_point() else t for t in call)))


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compares results with those of eager."""
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        if one.numel():
            assert (one.double() - other).abs().max() <= 1e-3 * (other.abs().max() + 1e-3)


def loaded(path: Path, model: str = "model") -> Any:
    """Returns a model of the package, in a process that has not imported gnncompile."""
    assert "gnncompile" not in sys.modules
    return load_package(str(path / "model.pt2"), model)


class Plain(nn.Module):
    """A layer, a sort and a search, none of them ours."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        order = torch.sort(index.int(), stable=True)[1]
        return self.linear(x).relu(), torch.topk(index, 2)[0], order.cumsum(0)


def plain(name: str, path: Path) -> None:
    """AOTInductor alone."""
    model, rows = Plain().cuda().eval(), torch.export.Dim.DYNAMIC
    first, second = (
        (torch.randn(n, 16, device="cuda"), torch.randint(10, (m,), device="cuda")) for n, m in ((10, 20), (300, 700))
    )
    program = torch.export.export(model, first, dynamic_shapes=({0: rows}, {0: rows}))
    made = torch._inductor.aoti_compile_and_package(program, package_path=str(path / "plain.pt2"))
    for found, expected in zip(torch._inductor.aoti_load_package(made)(*second), model(*second), strict=True):
        torch.testing.assert_close(found, expected)


def traced(name: str, path: Path) -> None:
    """The traced program with Triton's own launches."""
    from gnncompile.options import Options
    from gnncompile.serving import bound_indices
    from gnncompile.serving.package import KINDS, _Call, input_names
    from gnncompile.serving.program import capture

    model, example, calls = model_of(name)
    captured = capture(model, example, {}, {})
    program = _Call(captured, model, example, {}, input_names(model, example, {})).plain().program
    bound_indices.run(program.graph)
    program = KINDS["cuda"].rewrites(Options()).decomposed(program)
    with torch.no_grad():
        for call in calls:
            print([tuple(tensor.shape) for tensor in call], flush=True)
            check(tree_leaves(program.module()(*call)), exact(model, call))


def package(name: str, path: Path) -> None:
    """The package is written, and the calls for later stages."""
    import gnncompile

    model, example, calls = model_of(name)
    print(gnncompile.package_info(gnncompile.package(model, example, path / "model.pt2", keep_layout=KEEPS)))
    torch.save([(call, exact(model, call)) for call in calls], path / "calls")


def load(name: str, path: Path) -> None:
    """The package is loaded."""
    loaded(path)
    torch.cuda.synchronize()


def run(name: str, path: Path) -> None:
    """Calls of many sizes."""
    served = loaded(path)
    for call, expected in torch.load(path / "calls"):
        print([tuple(tensor.shape) for tensor in call], flush=True)
        check(tree_leaves(served(*call)), expected)


def wrong(name: str, path: Path) -> None:
    """Wrong inputs, each followed by a right call."""
    served = loaded(path)
    good, expected = torch.load(path / "calls")[0]
    for at, tensor in enumerate(good):
        if tensor.is_floating_point():
            others = [tensor.double(), tensor.cpu(), tensor[..., :-1].contiguous()]
        else:
            # A larger entry of `batch` is another graph.
            larger = [tensor + 10**6, tensor + 2**40] if tensor.dim() == 2 else []
            others = [*larger, tensor - 10**6, tensor.int()]
        for other in others:
            try:
                served(*(other if k == at else given for k, given in enumerate(good)))
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(at, str(error).splitlines()[0], flush=True)
            else:
                raise AssertionError(f"input {at} was served: {other.dtype}, {other.device}, {tuple(other.shape)}")
            check(tree_leaves(served(*good)), expected)


def kept(name: str, path: Path) -> None:
    """Calls with kept layouts."""
    if not KEEPS:
        print("skipped, without KEEP_LAYOUT=1", flush=True)
        return
    layout_of, served = (loaded(path, which) for which in ("layout", "with_layout"))
    for call, expected in torch.load(path / "calls"):
        layout = layout_of(*call)
        for _ in range(2):
            check(tree_leaves(served(layout, *call)), expected)
        try:
            served([layout[0] + 1, *layout[1:]], *call)
        except RuntimeError as error:
            print(str(error).splitlines()[0], flush=True)
        else:
            raise AssertionError("the layout of another graph was taken")


def times(name: str, path: Path) -> None:
    """The times of answers."""
    served = loaded(path)
    layout_of, with_layout = (loaded(path, which) if KEEPS else None for which in ("layout", "with_layout"))
    import gnncompile
    from tests.e2e.test_package import MODELS, inputs_of

    model = model_of(name)[0]
    ways: dict[str, Callable[..., Any]] = {"package": served, "compiled": gnncompile.compile(model), "eager": model}
    for size in ((30, 90, 1), (2000, 20_000, 8), (100_000, 1_000_000, 100)):
        call = tuple(tensor.cuda() for tensor in inputs_of(MODELS[name][1], size, 1))
        if layout_of is not None:
            ways["kept"] = functools.partial(with_layout, layout_of(*call))
        for way, answer in ways.items():
            took = []
            for _ in range(120):
                start = time.perf_counter()
                with torch.no_grad():
                    answer(*call)
                torch.cuda.synchronize()
                took.append(1e6 * (time.perf_counter() - start))
            took = sorted(took[20:])
            print(f"{size}: {way:9} p50 {took[50]:10,.1f} us  p99 {took[98]:10,.1f} us", flush=True)


STAGES = (plain, traced, package, load, run, wrong, kept, times)


def succeeds(command: list[str], environment: dict[str, str]) -> bool:
    """Runs a command. Returns whether it ends in time and without an error."""
    try:
        return subprocess.run(command, env=environment, timeout=SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"not done within {SECONDS} s", flush=True)
        return False


def tell(command: list[str], environment: dict[str, str]) -> None:
    """Prints where a stage dies."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if shutil.which("gdb"):
        succeeds(["gdb", "-batch", "-ex", "run", "-ex", "bt", "--args", *command], environment)
    if sanitizer is not None:
        succeeds([sanitizer, "--print-limit", "5", *command], environment)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.package_stages", description=__doc__)
    parser.add_argument("models", nargs="*", default=["SAGE"])
    parser.add_argument("--first", choices=["plain", "traced", "package"], default="plain", help="start here")
    parser.add_argument("--stage", choices=[stage.__name__ for stage in STAGES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is not None:
        faulthandler.enable()
        faulthandler.dump_traceback_later(SECONDS - 10)
        next(stage for stage in STAGES if stage.__name__ == args.stage)(args.models[0], args.folder)
        return 0
    environment, began = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}, time.perf_counter()
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            for stage in STAGES[[stage.__name__ for stage in STAGES].index(args.first) :]:
                command = [sys.executable, "-m", "tests.package_stages", name]
                command += ["--stage", stage.__name__, "--folder", folder]
                print(f"{name}: {stage.__name__}, {time.perf_counter() - began:.0f} s after the start", flush=True)
                mine = dict(os.environ) if stage is times else environment
                if not succeeds(command, mine):
                    tell(command, environment)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
