"""The registry of substitutes: functions that Dynamo traces instead of functions and methods of PyG and torch.

A substitute is a function with the decorator :func:`substitute`::

    @substitute(SomeConv.forward)
    def some_conv_forward(self, x, edge_index):
        ...

A substitute has the same parameters as its original. If they differ in the installed release of PyG, the original is
traced as written, and :data:`MISMATCHED` gets its name. This is checked when gnncompile is imported.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

METHODS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Substitutes, by the method of a class (or the getter of a property) that they replace."""

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Substitutes, by the function of a module that they replace."""

MISMATCHED: list[str] = []
"""The names of originals whose parameters differ from their substitutes'. They are traced as written."""


def substitute(*originals: Callable[..., Any]) -> Callable[[F], F]:
    """A decorator that registers a function as the substitute of methods or functions.

    Args:
        originals: Methods, as ``SomeConv.forward``, or functions, as ``torch_geometric.utils.scatter``.
    """

    def register(ours: F) -> F:
        for original in originals:
            if not _takes_the_same(original, ours):
                name = getattr(original, "__qualname__", repr(original))
                logger.warning("%s takes other arguments than %s: it is traced as written", name, ours.__name__)
                MISMATCHED.append(name)
                continue
            (METHODS if _is_method(original) else FUNCTIONS)[original] = ours
        return ours

    return register


def _is_method(original: Callable[..., Any]) -> bool:
    return isinstance(original, types.FunctionType) and "." in original.__qualname__.rpartition("<locals>.")[2]


def _takes_the_same(original: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether two functions have parameters of the same names and kinds; ``*args`` in `ours` accepts any."""
    own = _parameters(ours)
    if any(kind is inspect.Parameter.VAR_POSITIONAL for _, kind in own):
        return True
    return own == _parameters(original)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]
