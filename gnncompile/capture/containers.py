"""Objects that hold tensors (``Data``, ``HeteroData``, ``Batch``, dataclasses) as arguments of a compiled call.

A shallow copy enters the compiled code, from which everything that :mod:`gnncompile.capture.inputs` takes apart was
taken out. Inside it is put back, so that the model sees an object of the same class with the same attributes. What the
model writes to the copy is written to the caller's object behind the call, and where the model returns the copy, the
caller gets the object.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor

from gnncompile.layout.batch_metadata import Count, attached

_DICTS_OF_STORES = ("_node_store_dict", "_edge_store_dict")


class Opened(NamedTuple):
    """A copy of an object and what was taken out of it, per store of a ``Data``; a dataclass is one store."""

    shell: Any
    parts: tuple[dict[str, Any], ...]


def is_container(value: Any) -> bool:
    """Whether an argument is an object that is taken apart."""
    if isinstance(value, BaseData):
        return hasattr(value, "stores")
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return hasattr(value, "__dict__")


def holds_structure(value: Any) -> bool:
    """Whether an attribute is taken out: integer tensors, and what may hold some."""
    if isinstance(value, Tensor):
        plain = value.is_floating_point() and value.layout == torch.strided and type(value) is Tensor
        return not plain or attached(value) is not None
    return isinstance(value, (tuple, list, dict, SparseTensor)) or is_container(value)


def open_container(value: Any, split: Callable[[Any, int, str], Any]) -> Opened:
    """Takes an object apart; `split` gets an attribute, the number of its store, and its name."""
    shell = copy.copy(value)
    for store in shell.stores if isinstance(shell, BaseData) else ():
        numbers = [name for name, held in vars(store).items() if type(held) is Count]
        vars(store).update((name, int(vars(store)[name])) for name in numbers)
    parts = []
    for at, attributes in enumerate(attributes_of(shell)):
        found = {name: split(held, at, name) for name, held in attributes.items() if holds_structure(held)}
        attributes.update(dict.fromkeys(found))
        parts.append(found)
    return Opened(shell, tuple(parts))


def attributes_of(value: Any) -> list[dict[str, Any]]:
    """The attributes of each store as dicts that may be written to."""
    if not isinstance(value, BaseData):
        return [vars(value)]
    for store in value.stores:
        store.__dict__.pop("_cached_attr", None)  # is filled by use, which would be a guard on whether it was used
    return [store._mapping for store in value.stores]


def put_together(opened: Opened, join: Callable[[Any], Any], joined: list[Any]) -> Any:
    """The copy with everything in its place, traced by Dynamo; adds what was put where to `joined`."""
    if isinstance(opened.shell, BaseData):
        for store, parts in zip(opened.shell.stores, opened.parts, strict=True):
            for name, part in parts.items():
                value = join(part)
                store._mapping[name] = value
                joined.append((store._mapping, name, value))
    else:
        for name, part in opened.parts[0].items():
            value = join(part)
            object.__setattr__(opened.shell, name, value)
            joined.append((opened.shell, name, value))
    return opened.shell


def empty_again(joined: list[Any]) -> None:
    """Takes out again what the model did not replace, so that it is no result of the compiled code; traced too."""
    for holder, name, value in joined:
        if isinstance(holder, dict):
            if name in holder and holder[name] is value:
                holder[name] = None
        elif getattr(holder, name, None) is value:
            object.__setattr__(holder, name, None)


def write_back(value: Any, opened: Opened) -> None:
    """Gives an object the attributes that the model gave its copy."""
    shell = opened.shell
    for name in _DICTS_OF_STORES:
        theirs, ours = vars(value).get(name, {}), vars(shell).get(name, {})
        for key in ours.keys() - theirs.keys():
            theirs[key] = ours[key]
            theirs[key]._parent = value
    for before, after, parts in zip(attributes_of(value), attributes_of(shell), opened.parts, strict=False):
        for name in before.keys() - after.keys():
            del before[name]
        for name, held in after.items():
            taken_out = name in parts and held is None
            if not taken_out and before.get(name) is not held:
                before[name] = held


def give_back(result: Any, originals: list[tuple[Any, Opened]]) -> Any:
    """The result of a call, with the caller's objects in place of their copies."""
    for value, opened in originals:
        if result is opened.shell:
            return value
    if type(result) in (tuple, list):
        return type(result)(give_back(item, originals) for item in result)
    if type(result) is dict:
        return {key: give_back(item, originals) for key, item in result.items()}
    return result
