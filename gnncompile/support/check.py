"""Runs a case on several sizes, eager and compiled, and compares the results."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gnncompile import _compat
from gnncompile.capture.compile import callable_of, compile
from gnncompile.report.explain import count_syncs
from gnncompile.support.case import LADDER, Case, Graph


@dataclass(frozen=True)
class Result:
    """The result of a case.

    Attributes:
        name: The name of the case.
        eager: Why eager PyG can't run the case on some sizes; "" if it runs on all.
        graphs: The number of captured graphs over all sizes.
        breaks: The number of graph breaks over all sizes.
        syncs: The number of host syncs in a step on a graph that was seen before.
        regions: The number of fused regions in the first captured graph.
        wrong: The error, or the difference from eager; "" if all results are equal.
        why: What was not fused and why, and other notes.
        asks: The number of syncs that the layer needs however it is run.
        asks_for: The values that these syncs read, in words.
    """

    name: str
    eager: str = ""
    graphs: int = 0
    breaks: int = 0
    syncs: int = 0
    regions: int = 0
    wrong: str = ""
    why: tuple[str, ...] = ()
    asks: int = 0
    asks_for: str = ""

    @property
    def runs(self) -> bool:
        """Whether eager PyG runs the case on some size."""
        return bool(self.graphs or self.wrong)

    @property
    def passes(self) -> bool:
        """Whether one captured graph without a graph break serves all sizes, its results are right, and it syncs no
        more often than the layer must.
        """
        return (self.graphs, self.breaks, self.wrong) == (1, 0, "") and self.syncs <= self.asks


LOOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""The largest allowed difference, relative to the largest value (or to 1, if that is larger)."""


def check(case: Case, inference: bool = False, inductor: bool = False) -> Result:
    """Runs a case on all sizes, eager and compiled.

    Args:
        case: The case.
        inference: Whether the module runs in ``eval()`` without gradients, instead of a training step.
        inductor: Whether Inductor compiles the operations outside regions. Otherwise they run one by one, and the check
            takes a fraction of the time.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        model = case.make()
    except Exception as error:  # an option that the layer can't be made with
        return Result(case.name, f"when it is made: {_first_line(error)}")
    if isinstance(model, nn.Module):
        model = model.to(case.dtype).train(model.training and not inference)
    with torch.set_grad_enabled(not inference):
        return _compared(case, model, inductor)


def _compared(case: Case, model: Any, inductor: bool) -> Result:
    sizes, refused = [], []
    for size in LADDER:
        try:
            _run(case, _fresh(model), size)
            sizes.append(size)
        except Exception as error:
            refused.append(f"{size[0]} nodes, {size[1]} edges: {_first_line(error)}")
    if not sizes:
        return Result(case.name, refused[0])
    plain, compiled = _fresh(model), compile(_fresh(model), options={} if inductor else {"inductor": False})
    before, wrong = Counter(_compat.counters()["graph_break"]), ""
    for size in sizes:
        try:
            expected = _run(case, plain, size)
        except Exception as error:  # caused by state that the module keeps between calls
            refused.append(f"{size[0]} nodes, {size[1]} edges after others: {_first_line(error)}")
            break
        try:
            found = _run(case, compiled, size)
        except Exception as error:
            wrong = wrong or f"{size[0]} nodes, {size[1]} edges: {_first_line(error)}"
            break
        if not (case.drawn and getattr(model, "training", False)):
            wrong = wrong or _difference(expected, found, size, LOOSE[case.dtype])
    program = callable_of(compiled)
    assert program is not None
    breaks = Counter(_compat.counters()["graph_break"]) - before
    captured = program.backend.captured
    notes = [f"breaks at: {_reason(text)}" for text in breaks]
    notes += ["captured again for some size"] if len(captured) > 1 and not breaks else []
    skipped = [s for c in captured for s in c.log.skipped] + program.backend.notes
    notes += [f"{s.what}: {s.reason}" for s in skipped]
    args, kwargs = case.arguments(Graph(*sizes[0], case.dtype))
    return Result(
        case.name,
        "; ".join(refused),
        len(captured),
        breaks.total(),
        0 if wrong else _steady_syncs(compiled, args, kwargs),
        len(captured[0].log.regions) if captured else 0,
        wrong,
        tuple(dict.fromkeys(notes)),
        case.asks,
        case.asks_for,
    )


def _steady_syncs(compiled: Any, args: Any, kwargs: Any) -> int:
    """Counts the host syncs of a call on a graph that was seen before, but with new float tensors."""

    def copies() -> Any:
        known: dict[int, Tensor] = {}  # a tensor that is passed twice stays one tensor

        def anew(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if id(value) not in known:
                known[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
            return known[id(value)]

        return pytree.tree_map(anew, (args, kwargs))

    first, second = copies(), copies()
    compiled(*first[0], **first[1])
    return count_syncs(compiled, *second)


def _fresh(model: Any) -> Any:
    """Returns a copy of a module, whose running statistics start anew; a function is returned unchanged."""
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model


def _run(case: Case, model: Any, size: tuple[int, int]) -> list[Tensor | None]:
    """Returns the outputs, and the gradients of a weighted sum of the float outputs.

    The gradients are with respect to the float inputs and the parameters.
    """
    args, kwargs = case.arguments(Graph(*size, case.dtype))
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    random.seed(0)
    torch.manual_seed(0)
    outputs = list(_tensors(model(*args, **kwargs)))
    kept = [output.detach().clone() for output in outputs]  # invertible layers free their outputs in the backward
    total: Any = 0
    for output in outputs:
        if output.requires_grad and torch.is_grad_enabled():
            weight = torch.cos(torch.arange(output.numel(), dtype=output.dtype)).view_as(output)
            total = total + (output * weight).sum()
    leaves = [*inputs, *(model.parameters() if isinstance(model, nn.Module) else ())]
    gradients: list[Tensor | None] = []
    if isinstance(total, Tensor) and leaves:
        gradients = list(torch.autograd.grad(total, leaves, allow_unused=True))
    return [*kept, *gradients]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields all tensors of a result, also from dataclasses and objects with ``to_dict``."""
    if isinstance(value, Tensor):
        yield value.coalesce().values() if value.is_sparse else value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from _tensors(getattr(value, entry.name))
    elif hasattr(value, "to_dict"):
        yield from _tensors(value.to_dict())


def _difference(expected: list[Tensor | None], found: list[Tensor | None], size: tuple[int, int], loose: float) -> str:
    """Describes the first difference; "" if there is none.

    A missing gradient of eager's equals zeros: one graph for all sizes uses the same parameters on every size.
    """
    where = f"{size[0]} nodes, {size[1]} edges"
    if len(expected) != len(found):
        return f"{where}: {len(found)} results, eager has {len(expected)}"
    for k, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if theirs is None or ours is None:
            if theirs is not None or (ours is not None and bool(ours.any())):
                return f"{where}: result {k} is {'missing' if ours is None else 'there'}, unlike eager's"
        elif theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            return f"{where}: result {k} is {ours.dtype} {tuple(ours.shape)}, eager's {tuple(theirs.shape)}"
        elif theirs.numel():
            scale = max(float(theirs.abs().max()), 1.0) if theirs.is_floating_point() else 1.0
            close = torch.allclose(ours.double() / scale, theirs.double() / scale, rtol=0, atol=loose, equal_nan=True)
            if not close:
                worst = float((ours.double() - theirs.double()).abs().max()) / scale
                return f"{where}: result {k} is off by {worst:.1e}"
    return ""


def _reason(text: str) -> str:
    """Returns the explanation in Dynamo's description of a graph break."""
    lines = [line.strip() for line in text.splitlines()]
    found = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return (found or lines or [""])[0]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]
