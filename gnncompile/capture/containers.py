"""Objects that hold tensors (``Data``, ``HeteroData``, ``Batch``, dataclasses) as arguments of a compiled call.

The compiled code takes a shallow copy of the object. The attributes that :mod:`gnncompile.capture.inputs` takes apart
are taken out of the copy, and enter separately. Inside the compiled code they are put back, so the model sees an object
of the same class with the same attributes. After the call, the model's writes to the copy are written to the caller's
object. If the model returns the copy, the caller gets the original object.
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
    """A copy of an object, and the attributes taken out of it, one dict per store; a dataclass counts as one store."""

    shell: Any
    parts: tuple[dict[str, Any], ...]


class Collection(NamedTuple):
    """A list or dict that a model may write to.

    Attributes:
        target: The list or dict to which the changes belong: the caller's, or the one that enters the compiled code.
        written: The one to which they were written: that which enters, or the one that the model sees.
        before: A copy of `written`, made before.
    """

    target: Any
    written: Any
    before: Any


def is_container(value: Any) -> bool:
    """Whether an argument is an object that is taken apart: a ``Data``, or an instance of a dataclass."""
    if isinstance(value, BaseData):
        return hasattr(value, "stores")
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return hasattr(value, "__dict__")


def holds_structure(value: Any) -> bool:
    """Whether an attribute is taken out of the copy.

    Nested containers are taken out, and all tensors except plain floating ones without a loader's metadata.
    """
    if isinstance(value, Tensor):
        plain = value.is_floating_point() and value.layout == torch.strided and type(value) is Tensor
        return not plain or attached(value) is not None
    return isinstance(value, (tuple, list, dict, SparseTensor)) or is_container(value)


def open_container(value: Any, split: Callable[[Any, int, str], Any]) -> Opened:
    """Takes an object apart; `split` is called with an attribute, the index of its store, and its name."""
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
    """The attributes of an object, one dict per store; writes to the dicts change the object."""
    if not isinstance(value, BaseData):
        return [vars(value)]
    for store in value.stores:
        store.__dict__.pop("_cached_attr", None)  # a cache that use fills: Dynamo would guard on its content
    return [store._mapping for store in value.stores]


def put_together(opened: Opened, join: Callable[[Any], Any], joined: list[Any]) -> Any:
    """Puts the attributes back into the copy and returns the copy; traced by Dynamo.

    Appends ``(holder, name, value)`` to `joined` for each attribute that it puts back.
    """
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
    """Takes the attributes out again that the model did not replace, so they are no graph outputs; traced by Dynamo.

    What the model wrote to lists and dicts is written to those that entered.
    """
    for noted in joined:
        if isinstance(noted, Collection):
            pass_on(noted)
            continue
        holder, name, value = noted
        if isinstance(holder, dict):
            if name in holder and holder[name] is value:
                holder[name] = None
        elif getattr(holder, name, None) is value:
            object.__setattr__(holder, name, None)


def watch(target: Any, written: Any, found: list[Any]) -> Any:
    """Appends a :class:`Collection` to `found` and returns the list or dict to be written to; traced by Dynamo too."""
    found.append(Collection(target, written, written.copy()))
    return written


def pass_on(collection: Collection) -> None:
    """Makes the changes of a list or dict to its target, and leaves all other items there; traced by Dynamo too."""
    target, written, before = collection
    if isinstance(written, list):
        if len(written) != len(before) or any(now is not then for now, then in zip(written, before, strict=True)):
            target[:] = [_item(now, target, before) for now in written]
        return
    for key in before:
        if key not in written:
            del target[key]
    for key, now in written.items():
        if key not in before or now is not before[key]:
            target[key] = now


def _item(now: Any, target: list[Any], before: list[Any]) -> Any:
    """The item of a target that `now` was before, or `now` itself if it is new."""
    for at, then in enumerate(before):
        if now is then:
            return target[at]
    return now


def write_back(value: Any, opened: Opened) -> None:
    """Writes to the caller's object what the model wrote to its copy: new, changed and deleted attributes."""
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
    """The result of a call, with each copy replaced by the caller's object."""
    for value, opened in originals:
        if result is opened.shell:
            return value
    if type(result) in (tuple, list):
        return type(result)(give_back(item, originals) for item in result)
    if type(result) is dict:
        return {key: give_back(item, originals) for key, item in result.items()}
    return result
