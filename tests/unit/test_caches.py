"""Caches on disk: used by another process, never for another gnncompile; and what is made beside a compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gnncompile._compat import inductor
from gnncompile.capture.backend import AfterDifferentiation
from gnncompile.exc import UnsupportedRegion
from gnncompile.options import DEFAULTS
from gnncompile.runtime import launch
from tests.harness import forget_kernels

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys, torch, gnncompile
from torch._dynamo.utils import counters
row, col = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 1, 1])
x = torch.tensor([[0.1], [0.2], [0.3]], requires_grad=True)
model = lambda x, row, col: torch.zeros_like(x).index_add(0, col, torch.sin(x[row] + x[col])).tanh()
out = gnncompile.compile(model)(x, row, col)
out.sum().backward()
hits = dict(counters["aot_autograd"]), dict(counters["inductor"])
torch.save((gnncompile.__file__, out.detach(), x.grad, *hits), sys.argv[1])
"""

CHANGES = {
    "ops/region.py": ("gradients.append(value.to(", "gradients.append(3 * value.to("),
    "ir/pointwise.py": ('"std::sin({0})"', '"(2 * std::sin({0}))"'),
}
"""By file: three times the gradient, in the same forward, and a kernel that computes twice the sine."""


def _run(package: Path, caches: Path, target: Path, load: str = "") -> Any:
    names = {"TORCHINDUCTOR_CACHE_DIR": "torch", "GNNCOMPILE_CACHE_DIR": "ours"}
    environment = {**os.environ, **{variable: str(caches / name) for variable, name in names.items()}}
    # Trials of vector instructions take longer than all the rest.
    environment |= {"PYTHONPATH": str(package), "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    command = [sys.executable, "-c", SCRIPT, str(target)]
    subprocess.run(command, check=True, env=environment, cwd=caches.parent, timeout=300)
    file, *found = torch.load(target, weights_only=False)
    assert Path(file).parent.parent == package
    return found


def test_another_process_takes_all_from_disk_and_another_version_nothing(tmp_path: Path):
    changed = tmp_path / "changed"
    shutil.copytree(ROOT / "gnncompile", changed / "gnncompile", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in CHANGES.items():
        file = changed / "gnncompile" / name
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
    caches = tmp_path / "caches"
    first, other, again = (_run(p, caches, tmp_path / "found.pt") for p in (ROOT, changed, ROOT))
    row, col = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 1, 1])
    x = torch.tensor([[0.1], [0.2], [0.3]], requires_grad=True)
    sums = torch.zeros_like(x).index_add(0, col, torch.sin(x[row] + x[col]))
    (gradient,) = torch.autograd.grad(sums.tanh().sum(), x)
    torch.testing.assert_close(first[:2], [sums.tanh().detach(), gradient])
    out = (2 * sums).tanh().detach()
    edges = (x[row] + x[col]).cos().detach() * (1 - out**2)[col]
    gradient = 3 * torch.zeros_like(out).index_add(0, row, edges).index_add(0, col, edges)
    torch.testing.assert_close(other[:2], [out, gradient])
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    for found, (hits, misses) in ((first, (0, 1)), (other, (0, 1)), (again, (1, 0))):
        aot, graphs = found[2:]
        assert (aot.get("autograd_cache_hit", 0), aot.get("autograd_cache_miss", 0)) == (hits, misses)
        assert graphs.get("fxgraph_cache_miss", 0) == 2 * misses
        assert not aot.get("autograd_cache_bypass")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Regions whose kernels are made, in a thread or not, as they come; one called "bad" has none."""
    names: list[str] = []

    def make(spec: str, device: str) -> Any:
        time.sleep(0.05)
        names.append(spec)
        if spec == "bad":
            raise UnsupportedRegion("no kernel")
        return spec.upper()

    monkeypatch.setattr(launch, "_make", make)
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "cpp")
    yield names
    forget_kernels()
    launch.prepare.cache_clear()
    launch._build.cache_clear()


def test_a_graph_is_kept_for_the_dtype_of_autocast_that_it_was_made_for():
    """torch 2.11 by itself takes a graph for bfloat16 from its cache under autocast to float16."""
    keys = {AfterDifferentiation(DEFAULTS).uuid()}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.add(AfterDifferentiation(DEFAULTS).uuid())
    assert len(keys) == 3


def test_kernels_that_were_started_are_made_once(made: list[str]):
    for _ in range(3):
        launch.prepare("a", "cpu")
    launch.Call("b", "cpu")
    assert [launch.kernel(spec, "cpu") for spec in ("a", "b", "a", "c")] == ["A", "B", "A", "C"]
    launch.prepare("c", "cuda")
    assert sorted(made)[:3] == ["a", "b", "c"] and not launch._started.keys() & {
        ("a", "cpu", "cpp"),
        ("b", "cpu", "cpp"),
    }
    launch.prepare("bad", "cpu")
    with pytest.raises(UnsupportedRegion, match="no kernel"):
        launch.kernel("bad", "cpu")


def test_other_generators_and_forked_processes_start_anew(made: list[str], monkeypatch: pytest.MonkeyPatch):
    launch.prepare("a", "cpu")
    launch._after_fork()
    assert launch.kernel("a", "cpu") == "A" and not launch._started
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")
    launch.prepare("b", "cpu")
    assert not launch._started


def test_the_trial_of_vector_instructions_runs_once(monkeypatch: pytest.MonkeyPatch):
    """Who needs its result while it runs waits for it."""
    begun, go = threading.Event(), threading.Event()
    found: list[Any] = []

    def trial() -> None:
        begun.set()
        go.wait(10)
        found.append(inductor.cpu_vec_isa.valid_vec_isa_list())

    monkeypatch.setattr(inductor, "_preparing", {})
    inductor._begin("vectors", trial)
    inductor._begin("vectors", lambda: found.append("twice"))
    assert begun.wait(10)
    monkeypatch.setattr(
        inductor, "compile_fx", lambda *_, **__: found.append(inductor.cpu_vec_isa.valid_vec_isa_list())
    )
    monkeypatch.setattr(inductor, "_report_symbols", lambda: None)  # there is no capture
    other = threading.Thread(target=lambda: inductor.compile_inductor(torch.fx.symbolic_trace(lambda x: x), [], {}))
    other.start()
    other.join(0.1)
    assert other.is_alive() and not found
    go.set()
    other.join(60)
    assert len(found) == 2 and found[0] is found[1]


def test_sets_of_vector_instructions_are_tested_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    """Only sets that the processor has are tested, each once, before Inductor's list is made."""
    tested: list[str] = []
    all_here = threading.Barrier(2, timeout=30)

    class Instructions:
        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return self.name

        def __bool__(self) -> bool:
            all_here.wait()
            tested.append(self.name)
            return self.name != "wide"

    vectors = inductor.cpu_vec_isa
    sets = [Instructions(name) for name in ("wide more", "wide", "narrow")]
    monkeypatch.setattr(vectors, "x86_isa_checker", lambda: ["wide", "narrow"])
    monkeypatch.setattr(vectors, "supported_vec_isa_list", sets)
    monkeypatch.setattr(vectors, "valid_vec_isa_list", lambda: tested.append("list"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    inductor._test_vectors()
    assert sorted(tested[:2]) == ["narrow", "wide"] and tested[2:] == ["list"]
