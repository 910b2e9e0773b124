"""Visits every tensor in the arguments of a model, which are tensors, or nested tuples, lists and dicts of tensors."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor in a nest with its place, for example `input 0.paper`; other values are skipped."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors(part, f"{name}.{'__'.join(key) if isinstance(key, tuple) else key}")
    elif isinstance(value, (tuple, list)):
        for position, part in enumerate(value):
            yield from tensors(part, f"{name}.{position}")


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns the nest with `function` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, part) for part in value)
    return value
