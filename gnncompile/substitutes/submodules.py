"""Finds the modules that a callable runs."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree


def modules_of(target: Any) -> list[nn.Module]:
    """The modules of a callable: itself, the owner of a bound method, or modules that it refers to by a name."""
    if isinstance(target, nn.Module):
        return [target]
    if isinstance(target, functools.partial):
        values = [target.func, *target.args, *target.keywords.values()]
        return [module for value in values for module in modules_of(value)]
    named: list[Any] = [getattr(target, "__self__", None)]
    function = inspect.unwrap(getattr(target, "__func__", target))
    if not inspect.isfunction(function):
        named += getattr(target, "__dict__", {}).values()
    else:
        names = inspect.getclosurevars(function)
        named += [*names.nonlocals.values(), *names.globals.values(), *(function.__defaults__ or ())]
    return [module for module in pytree.tree_leaves(named) if isinstance(module, nn.Module)]
