"""Runs a compiled model on an example, for :func:`gnncompile.warmup`, and restores all state afterwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnncompile.capture.compiled_callable import CompiledCallable, is_lazy
from gnncompile.capture.containers import attributes_of, is_container
from gnncompile.cudagraphs import native
from gnncompile.cudagraphs.pool import OFTEN, WARM, CudaGraphPool
from gnncompile.device import device_of
from gnncompile.exc import LazyParameterError
from gnncompile.substitutes.submodules import modules_of

RUNS = 2
"""Runs of an example without recordings: a second run reads the state that a model keeps in its first call."""


def run_ahead(program: CompiledCallable, args: tuple[Any, ...], kwargs: dict[str, Any], fresh: bool = False) -> None:
    """Runs a compiled callable on one example until it is compiled and recorded; see :func:`gnncompile.warmup`.

    Raises:
        LazyParameterError: The model has parameters without a shape.
    """
    modules = [part for module in modules_of(program.target) for part in module.modules()]
    if any(map(is_lazy, modules)):
        raise LazyParameterError(
            "warmup: the model has parameters without a shape, and the first call is to give them one. Call it once "
            "before, or state the number of input channels, as in SAGEConv(16, 64) for SAGEConv(-1, 64)."
        )
    given = list(_tensors((args, kwargs)))
    kept = []  # keeps the copies alive, so each has its own address
    with _unchanged(modules, given):
        for number in range(RUNS + WARM + OFTEN):
            if number >= _runs(program, fresh):
                break
            kept.append(copy.deepcopy((args, kwargs)) if fresh else _own((args, kwargs)))
            _step(program, *kept[-1])
    if any(r.settings.native for r in _recordings(program)):
        native.wait()


def _runs(program: CompiledCallable, fresh: bool) -> int:
    recorded = any(r.reason is None for r in _recordings(program))
    return WARM + 1 + (OFTEN if fresh else 0) if recorded else RUNS


def _recordings(program: CompiledCallable) -> list[CudaGraphPool]:
    return [c.recordings for c in program.backend.captured if isinstance(c.recordings, CudaGraphPool)]


def _step(program: CompiledCallable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a forward and, if a result has a gradient, a backward that accumulates nothing."""
    result = program(args, kwargs)
    outputs = [t for t in _tensors(result) if t.grad_fn is not None]
    leaves = _leaves(outputs)
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """The leaf tensors in which a backward of the outputs would accumulate gradients."""
    found: list[Tensor] = []
    seen, reached = set(), [t.grad_fn for t in outputs]
    while reached:
        node: Any = reached.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            reached += [following for following, _ in node.next_functions]
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif is_container(value):
        yield from _tensors(attributes_of(value))


def _own(value: Any) -> Any:
    """Copies of the containers, holding the same tensors; tensors with a history are replaced by detached leaves."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.grad_fn is not None else value
    if type(value) in (tuple, list):
        return type(value)(_own(part) for part in value)
    if type(value) is dict:
        return {name: _own(part) for name, part in value.items()}
    if is_container(value):
        value = copy.copy(value)
        for attributes in attributes_of(value):
            attributes.update({name: _own(part) for name, part in attributes.items()})
    return value


@contextmanager
def _unchanged(modules: list[nn.Module], given: list[Tensor]) -> Iterator[None]:
    """Restores modules, tensors and random number generators after the block."""
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))] + given
    devices = sorted({t.get_device() for t in tensors if device_of(t.device).has_random_state})
    dense = {id(t): t.detach().as_subclass(Tensor) for t in tensors if t.layout == torch.strided}
    values = [(t, t.clone()) for t in dense.values()]
    places: list[Any] = [vars(m) for m in modules]
    places += [held for place in list(places) for held in place.values() if type(held) in (dict, list)]
    contents = [(place, copy.copy(place)) for place in places]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for place, content in contents:
            if not _same(place, content):
                place.clear()
                place.update(content) if isinstance(place, dict) else place.extend(content)
        with torch.no_grad():
            for tensor, value in values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _same(one: Any, other: Any) -> bool:
    """Whether two dicts, or two lists, hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()))
    return all(a is b for a, b in zip(one, other, strict=True))
