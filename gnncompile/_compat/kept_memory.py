"""Which buffers of Inductor's code for CPUs live in memory that stays (:mod:`gnncompile.runtime.kept_memory`)."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from gnncompile._compat.inductor import OwnPass, V
from gnncompile.device import device_of

LEAST_KEPT = 2**18
"""The least bytes of a buffer that lives in memory that stays.

The C library keeps the memory of smaller ones itself. A larger one often gets new pages, which the system clears first.
"""

_THEIRS, _OURS = "empty_strided_cpu", "_gnncompile_empty"
_IMPORT = f"from gnncompile.runtime.kept_memory import empty_strided as {_OURS}"


def patch_buffer_allocation() -> None:
    """Lets large buffers that do not leave a compiled graph, or wait for its backward, live in memory that stays.

    A result that the caller gets has memory of its own, and likewise a gradient. The size of a buffer is compared in
    each call, unless it is fixed.
    """
    allocation: Any = PythonWrapperCodegen.make_buffer_allocation

    @functools.wraps(allocation)
    def make_buffer_allocation(self: Any, buffer: Any) -> str:
        line, name = str(allocation(self, buffer)), buffer.get_name()
        theirs = f"{name} = {_THEIRS}("
        if not _keeps_memory() or theirs not in line or name in _buffers_of_results(self):
            return line
        elements, least = V.graph.get_allocation_storage_size(buffer), -(-LEAST_KEPT // buffer.get_dtype().itemsize)
        known = int(elements) if isinstance(elements, int) or elements.is_number else None
        if known is not None and known < least:
            return line
        self.add_import_once(_IMPORT)
        ours = _OURS
        if known is None:
            ours = f"({_OURS} if {self.codegen_python_sizevar(elements)} >= {least} else {_THEIRS})"
        return line.replace(theirs, f"{name} = {ours}(", 1)

    PythonWrapperCodegen.make_buffer_allocation = make_buffer_allocation  # type: ignore[method-assign]


def _keeps_memory() -> bool:
    """Whether buffers of the current graph live in memory that stays. Beside a GPU, gradients may take them over."""
    own = inductor_config.post_grad_custom_pre_pass
    in_cpp = all(device_of(kind).is_cpp_in_inductor for kind in V.graph.device_types)
    return isinstance(own, OwnPass) and own.keeps_memory and in_cpp


_NONE: set[str] = set()


def _buffers_of_results(wrapper: Any) -> set[str]:
    """Returns the buffers whose memory the caller gets, by their names.

    Where Inductor reuses the memory of a buffer, and where an operation returns an alias of its input, the buffer of a
    result is another one than the first in that memory. The lines of the code are complete when this is asked.
    """
    lines = wrapper.lines
    count, known = getattr(wrapper, "gnncompile_results", (0, _NONE))
    if count == len(lines):
        return known
    before = {line.reused_as.get_name(): line.node.get_name() for line in lines if hasattr(line, "reused_as")}
    found: set[str] = set()
    left = _results()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [before[name]] if name in before else []
            left += _aliased(name)
    wrapper.gnncompile_results = len(lines), found
    return found


def _aliased(name: str) -> list[str]:
    """Returns the buffers of which a buffer is an alias."""
    buffer: Any = V.graph.try_get_buffer(name)
    makers = [buffer, buffer.get_defining_op()] if hasattr(buffer, "get_defining_op") else []
    return [
        alias
        for maker in makers
        if hasattr(maker, "get_inputs_that_alias_output")
        for alias in maker.get_inputs_that_alias_output()
    ]


def _results() -> list[str]:
    """Returns the names of the results that the caller gets. Others wait for the backward."""
    names = list(V.graph.get_output_names())
    graph: fx.Graph = V.graph.module.graph  # type: ignore[assignment]
    (end,) = graph.find_nodes(op="output")
    given = end.meta.get("user_visible_output_idxs")
    return names if V.graph.is_backward or V.graph.is_inference or not given else [names[at] for at in given]
