"""How many calls a reader follows from file to file while one region becomes the source of its kernels.

A *hop* is a pair of functions in different files of gnncompile. The first one calls the second, and goes on when the
second is done. Further calls between the same two functions add no hop, since they are no further step to understand.

Hops are counted from the text of a region to the texts of all modules of its kernel. For Triton these are the kernels
for rows, for hubs and for denser graphs. Only what loads a finished text is left out. The rows of a tiled region are
computed by other regions, which count for themselves.

A property is a function, and a comprehension is a part of the function around it. If torch or Python calls a function,
the caller is the last function of gnncompile before it. A *return* is a hop to a file that waits for its caller: a
reader comes back to this file in the middle of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)
import gnncompile
from gnncompile.codegen.cpp import kernel as cpp_kernel
from gnncompile.codegen.triton import kernel as triton_kernel
from gnncompile.codegen.triton import tiled_kernel
from gnncompile.ir.region import Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.vjp import vjp
from tests import tiled_regions
from tests.kernels.test_golden import REGIONS

PACKAGE = str(Path(gnncompile.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")

MOST = 2
"""Most hops of the Triton generator for each hop of the C++ generator."""


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE)[1:]}:{code.co_name}:{code.co_firstlineno}"


def _callers(frame: FrameType) -> Iterator[CodeType]:
    """Yields the functions of gnncompile that wait for a call, the nearest first."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_filename.startswith(PACKAGE) and caller.f_code.co_name not in COMPREHENSIONS:
            yield caller.f_code
        caller = caller.f_back


@dataclass
class Hops:
    """The hops of a piece of work, each as the names of two functions.

    Attributes:
        pairs: All hops.
        returns: The hops to a file that waits for its caller.
    """

    pairs: set[tuple[str, str]] = field(default_factory=set)
    returns: set[tuple[str, str]] = field(default_factory=set)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        caller, *waiting = [*_callers(frame), None]
        if caller is None or caller.co_filename == code.co_filename:
            return
        pair = _name(caller), _name(code)
        self.pairs.add(pair)
        if any(one is not None and one.co_filename == code.co_filename for one in waiting):
            self.returns.add(pair)

    def follow(self, work: Callable[[], object]) -> Hops:
        """Counts while `work` runs."""
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            work()
        finally:
            sys.setprofile(before)
        return self


def hops(make: Callable[[Region], object], region: Region) -> Hops:
    """Returns the hops from the text of a region to the source of its kernels, which `make` generates."""
    spec = region.spec
    parse.cache_clear()  # the properties of a region are computed once, and then kept
    return Hops().follow(lambda: make(parse(spec)))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets texts be generated, but not compiled or executed."""
    nothing = SimpleNamespace(run=SimpleNamespace(), region_kernel=None, walk_tiles=None)
    monkeypatch.setattr(cpp_kernel, "load", lambda source, contract: nothing)
    monkeypatch.setattr(cpp_kernel, "_products", lambda region: None)
    monkeypatch.setattr(triton_kernel, "load_module", lambda text: nothing)
    monkeypatch.setattr(tiled_kernel, "load_module", lambda text: nothing)


def maximum_backward(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """The gradient of a maximum over the edges of each row."""
    forward = with_residuals(triton_regions.max_and_min(by, dtype, heads, channels))
    given = tuple(k == 0 for k in range(len(forward.outputs)))
    return vjp(forward, (True,), given).stages[-1].region


def check(name: str, triton: Hops, cpp: Hops) -> None:
    """Prints the numbers of a region, which ``pytest -s`` shows, and compares them."""
    counts = ", ".join(f"{len(one.pairs)} hops with {len(one.returns)} returns" for one in (triton, cpp))
    print(f"{name}, Triton and C++: {counts}")
    assert len(cpp.pairs) > 30
    assert len(triton.pairs) <= MOST * len(cpp.pairs), "\n".join(map(" -> ".join, sorted(triton.pairs)))


@pytest.mark.parametrize("case", [*REGIONS, maximum_backward], ids=lambda case: case.__name__)
def test_triton_takes_at_most_twice_the_hops_of_cpp(case: triton_regions.Case, unloaded: None):
    region = case(Space.DESTINATION, "float32", 4, 32)
    check(case.__name__, hops(triton_kernel.triton_kernel, region), hops(cpp_kernel.CppKernel, region))


@pytest.mark.parametrize("name", tiled_regions.REGIONS)
def test_so_it_does_in_tiles(name: str, unloaded: None):
    region = tiled_regions.REGIONS[name](tiled_regions.Maker())
    rows = SimpleNamespace(listing="")
    triton = hops(lambda region: tiled_kernel.TiledKernel(region, lambda part: rows), region)
    check(name, triton, hops(cpp_kernel.CppKernel, region))


def test_hops_lead_from_file_to_file(unloaded: None):
    found = hops(triton_kernel.triton_kernel, triton_regions.neighbour_sum(Space.DESTINATION, "float32", 4, 32))
    names = {tuple(name.rsplit(":", 1)[0] for name in pair) for pair in found.pairs}
    assert ("codegen/triton/kernel.py:__init__", "codegen/triton/plan.py:schedule") in names
    assert ("codegen/triton/tile.py:choose_tile", "ir/region.py:grid") in names  # by way of functools
    assert all(one.split(":")[0] != other.split(":")[0] for one, other in names)
    assert not any(comprehension in name for pair in names for name in pair for comprehension in COMPREHENSIONS)
    assert found.returns < found.pairs
