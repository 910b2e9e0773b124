"""Which buffers of Inductor's code for CPUs live in memory that stays (:mod:`gnncompile.runtime.kept_memory`)."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from gnncompile._compat.inductor import OwnPass, V

LEAST_KEPT = 2**18
"""The least bytes of a buffer that lives in memory that stays.

The C library keeps the memory of smaller ones itself. A larger one often gets new pages, which the system clears first.
"""

_THEIRS, _OURS = "empty_strided_cpu(", "_gnncompile_empty("
_IMPORT = "from gnncompile.runtime.kept_memory import empty_strided as _gnncompile_empty"


def patch_buffer_allocation() -> None:
    """Lets large buffers that do not leave a compiled graph, or wait for its backward, live in memory that stays.

    A result that the caller gets has memory of its own: it may live long, and ``torch.save`` writes the whole memory
    below a tensor. The same holds for gradients, which become the `grad` of parameters.
    """
    allocation: Any = PythonWrapperCodegen.make_buffer_allocation

    @functools.wraps(allocation)
    def make_buffer_allocation(self: Any, buffer: Any) -> str:
        line = str(allocation(self, buffer))
        theirs = f"{buffer.get_name()} = {_THEIRS}"
        if not _keeps_memory() or theirs not in line or _expected_bytes(buffer) < LEAST_KEPT:
            return line
        if buffer.get_name() in _buffers_of_results(self):
            return line
        self.add_import_once(_IMPORT)
        return line.replace(theirs, f"{buffer.get_name()} = {_OURS}", 1)

    PythonWrapperCodegen.make_buffer_allocation = make_buffer_allocation  # type: ignore[method-assign]


def _keeps_memory() -> bool:
    own = inductor_config.post_grad_custom_pre_pass
    return isinstance(own, OwnPass) and own.keeps_memory


def _expected_bytes(buffer: Any) -> int:
    """Returns the bytes of a buffer at the sizes of the first call; 0 if they depend on data."""
    elements = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(buffer), fallback=0)
    return int(elements) * int(buffer.get_dtype().itemsize)


def _buffers_of_results(wrapper: Any) -> set[str]:
    """Returns the buffers whose memory the caller gets, by their names.

    Where Inductor reuses the memory of a buffer, the buffer of a result is another one than the first in that memory.
    """
    before = {line.reused_as.get_name(): line.node.get_name() for line in wrapper.lines if hasattr(line, "reused_as")}
    found = set()
    for name in _results():
        while name not in found:
            found.add(name)
            name = before.get(name, name)
    return found


def _results() -> list[str]:
    """Returns the names of the results that the caller gets. Others wait for the backward."""
    names = list(V.graph.get_output_names())
    graph: fx.Graph = V.graph.module.graph  # type: ignore[assignment]
    (end,) = graph.find_nodes(op="output")
    given = end.meta.get("user_visible_output_idxs")
    return names if V.graph.is_backward or not given else [names[at] for at in given]
