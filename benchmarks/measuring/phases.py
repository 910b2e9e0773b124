"""Splits the time of a first step into phases: each moment belongs to the innermost named function that is running."""

import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OTHER = "other"
"""The phase for time outside all named functions, which is mostly the run of the graph."""

PHASES: dict[str, tuple[tuple[str, str], ...]] = {
    "Dynamo": (("torch._dynamo.convert_frame", "_compile"),),
    "passes": (("gnncompile.passes.manager", "run_pre_grad"), ("gnncompile.passes.manager", "run_post_grad")),
    "AOTAutograd": (("torch._inductor.compile_fx", "compile_fx"), ("gnncompile._compat.inductor", "compile_fx")),
    "Inductor": (("torch._inductor.compile_fx", "_compile_fx_inner"),),
    "vectors": (("torch._inductor.cpu_vec_isa", "valid_vec_isa_list"),),
    "compilers": (("torch._inductor.async_compile", "AsyncCompile.wait"),),
    "our kernels": (("gnncompile.runtime.launch", "kernel"),),
}
"""The phases, and the functions of each. In `vectors` Inductor tries which vector instructions the C++ compiler and the
processor support. In `compilers` the process waits for C++ and Triton. Caches are read within AOTAutograd."""


@contextmanager
def exclusive(ours: bool) -> Iterator[dict[str, float]]:
    """Sums the seconds that this thread spends in each phase within the block.

    Args:
        ours: whether gnncompile runs, so that its functions are watched too.

    Yields:
        The seconds by phase; they are complete after the block.
    """
    spent: dict[str, float] = dict.fromkeys((*PHASES, OTHER), 0.0)
    here, stack, since = threading.current_thread(), [OTHER], [time.perf_counter()]

    def turn() -> None:
        now = time.perf_counter()
        spent[stack[-1]] += now - since[0]
        since[0] = now

    def watch(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not here:
                return function(*args, **kwargs)
            turn()
            stack.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                turn()
                stack.pop()

        return watched

    replaced: list[tuple[Any, str, Any]] = []
    for phase, functions in PHASES.items():
        for module, name in functions:
            if ours or not module.startswith("gnncompile"):
                holder, attribute = _holder(module, name)
                original = getattr(holder, attribute)
                replaced.append((holder, attribute, original))
                setattr(holder, attribute, watch(phase, original))
    since[0] = time.perf_counter()
    try:
        yield spent
    finally:
        turn()
        for holder, attribute, original in reversed(replaced):
            setattr(holder, attribute, original)


def _holder(module: str, name: str) -> tuple[Any, str]:
    holder: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for part in classes:
        holder = getattr(holder, part)
    return holder, attribute
