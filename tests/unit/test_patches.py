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
"""

_ELSEWHERE = "["
"""Marks a symbol that is an entry of a table, which the script does not see."""


def _replaced() -> tuple[set[str], set[str]]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    first, second = done.stdout.split("\n")[:2]
    return set(first.split()), set(second.split())


def _exists(symbol: str) -> bool:
    module, _, name = symbol.partition(":")
    found = sys.modules[module]
    for part in name.split("."):
        found = vars(found).get(part)
        if found is None:
            return False
    return True


def test_torch_is_replaced_at_the_first_compile_and_as_the_table_says():
    on_import, at_compile = _replaced()
    assert on_import == set()
    wanted = {symbol for patch in PATCHES for symbol in patch.symbols if _ELSEWHERE not in symbol}
    homes = {symbol for symbol in at_compile if symbol in wanted}
    assert homes == {symbol for symbol in wanted if _exists(symbol)}
    # A function that other modules have imported by name stands in each of them.
    names = {symbol.partition(":")[2].split(".")[-1] for symbol in wanted}
    assert {symbol for symbol in at_compile - homes if symbol.rpartition(".")[2].split(":")[-1] not in names} == set()


def test_every_patch_says_why_and_until_when():
    for patch in PATCHES:
        assert patch.symbols and patch.torch and patch.why.endswith(".") and patch.until.endswith(".")
