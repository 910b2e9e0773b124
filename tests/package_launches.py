"""Counts what a call of a package for a GPU launches, without a GPU.

The code of the model is written for a CPU: Inductor's kernels there stand for those on a GPU. The launches of our own
kernels depend on sizes, so the traced program runs in Triton's interpreter, which counts them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch._inductor.codecache import AotCodeCompiler

from gnncompile._compat import aoti
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.ops import launch, sorted_edges
from gnncompile.options import Options
from gnncompile.serving.package import KINDS, _settings

_TORCHS = {
    "products": r"aoti_torch_cpu_(?:addmm|mm|bmm|baddbmm)_out\(",
    "torch's kernels": r"^\s*cpp_fused_\w+\(|CHECK\(aoti_torch_cpu_(?!\w*mm_out)\w+\(",
}
"""What Inductor's code of a model calls, as patterns."""


class _Stop(BaseException):
    """Ends a compile when the code of the model is known."""


def code_of(traced: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the C++ code of a traced model, whose kernels for a GPU are not compiled."""
    for module in (launch, sorted_edges):
        monkeypatch.setattr(module, "compile_entry", lambda entry, device: None)
        monkeypatch.setattr(module, "link_entry", lambda wrapper, entry: entry.name)
    found = []

    def compiled(graph: Any, code: str, *others: Any, **more: Any) -> None:
        found.append(code)
        raise _Stop

    with monkeypatch.context() as patches:
        patches.setattr(AotCodeCompiler, "compile", compiled)
        with pytest.raises(_Stop):
            settings = _settings(Options(), {}, torch.device("cuda"))
            aoti.compile_program(traced.program, traced.names, settings, {}, KINDS["cuda"].rewrites(Options()))
    return found[0]


def torchs_launches(code: str) -> Counter[str]:
    """Returns how many products and how many other kernels of torch's the code of a model launches."""
    return Counter({what: len(re.findall(pattern, code, re.MULTILINE)) for what, pattern in _TORCHS.items()})


def own_launches(program: Any, call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns how often a call of a traced program launches each of our kernels."""
    found: Counter[str] = Counter()
    run, sort = Entry.run, Kernel.__call__

    def note(function: Any, programs: int) -> None:
        if programs > 0:
            found[getattr(function, "__name__", "") or function.fn.__name__] += 1

    def counted(self: Entry, tensors: Any, numbers: Any, programs: int) -> None:
        note(self.function, programs)
        run(self, tensors, numbers, programs)

    def counted_sort(self: Kernel, programs: int, *given: Any) -> None:
        note(self._kernel, programs)
        sort(self, programs, *given)

    with monkeypatch.context() as patches, torch.no_grad():
        patches.setattr(Entry, "run", counted)
        patches.setattr(Kernel, "__call__", counted_sort)
        program(*call)
    return found
