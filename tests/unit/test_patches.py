"""What gnncompile replaces in torch: nothing on import, and at the first compile what the table says."""

from __future__ import annotations

import subprocess
import sys

from gnncompile._compat.patches import PATCHES

SCRIPT = """
import functools, inspect, sys
import torch, torch_geometric.nn
import torch._dynamo.convert_frame, torch._inductor.compile_fx, torch._inductor.scheduler
import torch._inductor.codegen.cpp, torch._inductor.codegen.triton, torch._inductor.codegen.wrapper
import torch._inductor.runtime.triton_heuristics, torch._inductor.tiling_utils, torch._inductor.cpu_vec_isa
import torch._functorch._aot_autograd.runtime_wrappers, torch.nn.parallel.distributed

def replaceable():
    found = {}
    for module in [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "torch" and m is not None]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) or type(value) is functools._lru_cache_wrapper:
                found[f"{module.__name__}:{name}"] = value
            if inspect.isclass(value) and value.__module__ == module.__name__:
                for method, own in list(vars(value).items()):
                    if inspect.isroutine(own) or isinstance(own, (staticmethod, classmethod)):
                        found[f"{module.__name__}:{name}.{method}"] = own
    return found

def replaced(before):
    after = replaceable()
    return sorted(name for name, value in before.items() if after.get(name) is not value)

torch.compile(lambda x: x + 1)(torch.ones(2))  # Dynamo replaces some of torch itself
before = replaceable()
import gnncompile
print(*replaced(before), sep=" ")
gnncompile.compile(lambda x: x + 1)
print(*replaced(before), sep=" ")
from gnncompile._compat.patches import PATCHES
print(*[symbol for patch in PATCHES for symbol in patch.symbols if symbol in before])
"""

_ELSEWHERE = "["
"""Marks a symbol that is an entry of a table, which the script does not see."""


def _in_a_new_process() -> list[set[str]]:
    """What is replaced on import, what at the first compile, and what of the table there was before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    return [set(line.split()) for line in done.stdout.split("\n")[:3]]


def test_torch_is_replaced_at_the_first_compile_and_as_the_table_says():
    on_import, at_compile, there = _in_a_new_process()
    assert on_import == set()
    wanted = {symbol for patch in PATCHES for symbol in patch.symbols if _ELSEWHERE not in symbol}
    assert at_compile & wanted == there and len(there) >= len(wanted) - 3  # some are of other releases
    # A function that other modules have imported by name stands in each of them.
    names = {symbol.rpartition(".")[2].rpartition(":")[2] for symbol in wanted}
    assert {
        symbol for symbol in at_compile - wanted if symbol.rpartition(".")[2].rpartition(":")[2] not in names
    } == set()


def test_every_patch_says_why_and_until_when():
    for patch in PATCHES:
        assert patch.symbols and patch.torch and patch.why.endswith(".") and patch.until.endswith(".")
