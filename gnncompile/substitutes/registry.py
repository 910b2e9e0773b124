"""The registry of substitutes: what Dynamo traces in place of functions and methods of PyG and torch.

A substitute is a function with the decorator :func:`substitute`::

    @substitute(SomeConv.forward)
    def some_conv_forward(self, x, edge_index):
        ...

It takes the arguments of what it stands for. A release of PyG in which these are others is noticed when gnncompile is
imported: its own code is traced then, and :data:`MISMATCHED` has the name.
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
"""By method of a class (or getter of a property): what is traced in its place."""

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""By function of a module: what is traced in its place."""

MISMATCHED: list[str] = []
"""Originals whose arguments are not those of their substitutes. They have none."""


def substitute(*originals: Callable[..., Any]) -> Callable[[F], F]:
    """Registers a function as the substitute of methods or functions.

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
    """Whether two functions have the same parameters, by names and kinds; ``*args, **kwargs`` take any."""
    own = _parameters(ours)
    if any(kind is inspect.Parameter.VAR_POSITIONAL for _, kind in own):
        return True
    return own == _parameters(original)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]
