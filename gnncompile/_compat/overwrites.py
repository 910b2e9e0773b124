"""Writes results of calls over inputs that Inductor's code does not read afterwards."""

from __future__ import annotations

from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import buffer_reuse_key

from gnncompile._compat.inductor import V, ir
from gnncompile._compat.inductor_call import Borrowed, Call, Result


def place(call: Call, wrapper: Any) -> None:
    """Writes results over inputs where they may be, and allocates the other results that may be written over inputs.

    It comes before the names of inputs are taken, which change. :attr:`Call.taken` says what is written over.

    Args:
        call: The call whose line is written next.
        wrapper: Inductor's code.
    """
    inputs = list[Any](call.inputs)
    for k, result in enumerate(call.results):
        if not result.over or result.get_name() in V.graph.removed_buffers:
            continue
        at = next((at for at in result.over if _may_take(call, wrapper, at, result)), None)
        if at is None:
            wrapper.codegen_allocation(result)
            continue
        call.taken[at] = k
        wrapper.codegen_inplace_reuse(V.graph.try_get_buffer(inputs[at].get_name()), result)


def _may_take(call: Call, wrapper: Any, at: int, result: Result) -> bool:
    """Whether a result may have the memory of an input: all of it, which the call is the last to read."""
    names = [one.get_name() for one in list[Any](call.inputs)]
    buffer: Any = V.graph.try_get_buffer(names[at])
    node = V.graph.scheduler.name_to_fused_node[call.get_operation_name()]
    alone = inductor_config.inplace_buffers and names.count(names[at]) == 1
    if not alone or names[at] not in node.last_usage or not _owns_memory(buffer):
        return False
    return wrapper.can_reuse(buffer, result) and buffer_reuse_key(buffer) == buffer_reuse_key(result)


def _owns_memory(buffer: Any) -> bool:
    """Whether no other tensor shares the memory of a buffer: a kernel of Inductor's, or a call, has filled all of it.

    An input of the graph may share its memory, also if its caller gives it up.
    """
    filled = isinstance(buffer, Result) or type(buffer) is ir.ComputedBuffer
    return filled and not isinstance(buffer, Borrowed) and type(buffer.layout) is ir.FixedLayout
