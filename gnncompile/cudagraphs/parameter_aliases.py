"""Lets a captured graph run on other leaves than the parameters, so that it reaches nothing bound to the parameters.

The autograd node of a parameter belongs to the stream on which it was made. It lives as long as somebody holds it: an
older result of the model, say, or ``DistributedDataParallel``. A backward to the parameter itself then can't be
captured in a CUDA graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gnncompile import _compat


class _Thread(threading.local):
    leaves: dict[nn.Parameter, Tensor] | None = None


_thread = _Thread()


@contextmanager
def using_parameter_aliases(active: bool = True) -> Iterator[dict[nn.Parameter, Tensor]]:
    """A context manager: captured graphs that this thread runs inside it get a leaf of its own for each parameter.

    It yields these leaves by parameter. A parameter has no such leaf if hooks of the user's are called with its
    gradient.
    """
    found: dict[nn.Parameter, Tensor] = {}
    outer, _thread.leaves = _thread.leaves, found if active else None
    try:
        yield found
    finally:
        _thread.leaves = outer


def with_parameter_aliases(args: Sequence[Any]) -> Sequence[Any]:
    """Returns the inputs of a captured graph, with leaves in place of parameters inside
    :func:`using_parameter_aliases`.
    """
    leaves = _thread.leaves
    if leaves is None:
        return args
    return [_leaf(a, leaves) if _can_be_replaced(a) else a for a in args]


def _can_be_replaced(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad and not _compat.has_hooks(value)


def _leaf(parameter: nn.Parameter, leaves: dict[nn.Parameter, Tensor]) -> Tensor:
    if parameter not in leaves:
        leaves[parameter] = parameter.detach().requires_grad_()
    return leaves[parameter]
