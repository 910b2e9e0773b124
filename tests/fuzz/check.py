"""Compares a compiled program with eager, and reports the first difference."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.engines import engine
from tests.fuzz.graphs import Size
from tests.fuzz.program import HEADER, Program, load
from tests.fuzz.shaken import Shaken
from tests.fuzz.ways import Observed, Use
from tests.tape import tapes

AUTOCAST = {"autocast around": "around", "autocast within": "within"}
"""Precisions of models in float32 that run under autocast to bfloat16."""

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9} | dict.fromkeys(AUTOCAST, 2.0**-9)
"""The unit roundoff of each precision: half of the distance between 1 and the next larger number."""

SHAKES, MORE_SHAKES = 3, 40


class NotComparable(Exception):  # noqa: N818
    """Eager raises an exception, or gives results that are not finite."""


class Finding(AssertionError):  # noqa: N818
    """A difference between a compiled model and eager."""


@dataclass(frozen=True)
class Case:
    """A program and how to use it.

    Attributes:
        program: The program, or its source.
        sizes: The sizes of the graphs that the model is called with, one after the other.
        seed: The seed of inputs and parameters.
        dtype: "float64", "float32", "bfloat16", or one of :data:`AUTOCAST`.
        way: One of :data:`tests.fuzz.ways.WAYS`.
        engine: The `name` of :func:`tests.fuzz.engines.engine`.
        kernels: The kernels of regions, as in :func:`tests.harness.kernels`.
        frozen: Names of inputs without a gradient.
        reuse: Whether Inductor may reuse buffers.
        device: "cpu" or "cuda".
    """

    program: Program | str
    sizes: tuple[Size, ...] = (Size(),)
    seed: int = 0
    dtype: str = "float64"
    way: str = "training"
    engine: str = "inductor"
    kernels: str = "cpp"
    frozen: tuple[str, ...] = ()
    reuse: bool = True
    device: str = "cpu"

    @property
    def source(self) -> str:
        return self.program if isinstance(self.program, str) else self.program.source

    def __str__(self) -> str:
        """Returns a script that checks this case."""
        sizes = "".join(f"{size!r}, " for size in self.sizes)
        given = [f"sizes=({sizes})"]
        for name in ("seed", "dtype", "way", "engine", "kernels", "frozen", "reuse", "device"):
            given.append(f"{name}={getattr(self, name)!r}")
        end = "\n".join(f"    {text}," for text in given)
        return (
            f"from tests.fuzz.check import Case, check\nfrom tests.fuzz.graphs import Size\n\nNET = '''\n{HEADER}\n\n"
            f"{self.source}'''\ncheck(Case(\n    NET,\n{end}\n))\n"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # hypothesis prints this


def check(case: Case) -> None:
    """Runs a case, compiled and eager.

    Raises:
        NotComparable: Eager gives no result to compare with.
        Finding: The compiled model differs from eager, or raises.
    """
    net = load(case.source)
    use = _use(case, net)
    low, reference = _expected(case, net, use)
    found = _compiled(case, net, use)
    worst = _worst(case, net, use, low, reference, found, SHAKES, 8)
    if worst:  # more noise may show that rounding decides the difference
        worst = _worst(case, net, use, low, reference, found, MORE_SHAKES, 32)
    if worst:
        raise Finding(worst)


def _use(case: Case, net: type[torch.nn.Module]) -> Use:
    code = net.forward.__code__
    names = code.co_varnames[1 : code.co_argcount]
    dtype = getattr(torch, "float32" if case.dtype in AUTOCAST else case.dtype)
    autocast = AUTOCAST.get(case.dtype, "")
    return Use(names, case.sizes, case.seed, dtype, case.way, frozenset(case.frozen), case.device, autocast)


def _expected(case: Case, net: Any, use: Use) -> tuple[Observed, Observed]:
    """Returns the results of eager in the case's dtype, and in float64."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = replace(use, dtype=torch.float64).observe(net, False, {})
            low = reference if case.dtype == "float64" else use.observe(net, False, {})
    except Exception as error:  # the program may raise anything
        raise NotComparable(f"{type(error).__name__}: {error}") from error
    if not all(bool(v.isfinite().all()) for v in [*low.values(), *reference.values()] if v.is_floating_point()):
        raise NotComparable("not finite")
    return low, reference


def _compiled(case: Case, net: Any, use: Use) -> Observed:
    recorded = case.way in ("reduce-overhead", "TrainStep") and case.device == "cpu"
    options = {"inductor": False} if recorded else {}
    with (
        engine(case.engine, case.kernels, case.reuse),
        tapes() if recorded else nullcontext(),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        try:
            found = use.observe(net, True, options)
        except Exception as error:  # eager ran, so any exception here is a finding
            lines = str(error).strip().splitlines() or [""]
            raise Finding(f"{type(error).__name__}: {' '.join(lines[:2])[:200]}") from error
    for warning in told:
        if str(warning.message).startswith("gnncompile"):
            raise Finding(str(warning.message))
    return found


def _worst(
    case: Case, net: Any, use: Use, low: Observed, reference: Observed, found: Observed, shakes: int, times: float
) -> str | None:
    """Returns the first difference that is larger than `times` the effect of rounding on eager, or None."""
    unit = UNIT[case.dtype]
    moved = [low]
    for seed in range(shakes):
        with Shaken(2 * unit, seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            moved.append(replace(use, dtype=torch.float64).observe(net, False, {}))
    if found.keys() != reference.keys():
        return f"other results: {sorted(found.keys() ^ reference.keys())}"
    for name, expected in reference.items():
        value = found[name]
        if value.shape != expected.shape or value.dtype != low[name].dtype:
            return f"{name}: {value.dtype} {tuple(value.shape)}, expected {low[name].dtype} {tuple(expected.shape)}"
        if not expected.numel():
            continue
        slack = 64 * unit * max(1.0, float(expected.abs().max()))
        allowed = slack + times * max(_apart(m[name], expected) for m in moved)
        apart = _apart(value, expected)
        if not apart <= allowed:
            return f"{name}: {apart:.1e} apart, {allowed:.1e} allowed"
    return None


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
