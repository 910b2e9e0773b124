"""``gnncompile.explain``: reports what the compiler made of a model, as an object that prints a table."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnncompile import _compat
from gnncompile.capture.backend import Captured
from gnncompile.capture.compile import callable_of, compile, trained
from gnncompile.capture.compiled_callable import CompiledCallable, is_lazy
from gnncompile.cudagraphs.eligibility import host_waits
from gnncompile.device import device_of
from gnncompile.ir.printer import summary, to_text
from gnncompile.ir.region import parse
from gnncompile.layout.halo import group_of
from gnncompile.passes.log import RegionRecord
from gnncompile.report import html
from gnncompile.report.draw import draw
from gnncompile.report.launches import Launch, Measured, assigned, measure_steps, seen
from gnncompile.report.model_graph import ModelGraph, Trace, unfused_bytes
from gnncompile.report.tables import Findings, KernelReport, RegionReport
from gnncompile.runtime import launch
from gnncompile.steps.train_step import TrainStep, objective_of

USUAL_PRIORITY = (
    "exchanges wait for kernels that they should run beside: set TORCH_NCCL_HIGH_PRIORITY=1 in the environment of all "
    "processes before init_process_group"
)
"""The note of a model over parts whose exchanges have no stream of high priority."""


@dataclass(frozen=True)
class Report(Findings):
    """A report on what the compiler made of a model on given inputs; ``print`` shows it as a table.

    Attributes:
        regions: Fused regions, in order.
        skipped: The operations that were not fused, each with the reason and the user's line.
        graph_breaks: The number of graph breaks.
        recompiles: The number of captured graphs beyond the first of each frame, on these inputs.
        host_syncs: Device syncs of one call after the first, with the same inputs.
        captured_graphs: The number of captured graphs.
        structure_nodes: The number of operations that left the step for the structure program, which runs once per
            distinct graph.
        notes: Everything else that is unusual, such as kernels of the reference interpreter.
        model: The name of the class or function that was explained.
        device: The device that the model ran on: the name of a GPU, or "cpu".
        graphs: Each captured graph before and after the passes.
        forward: Median time of a call in milliseconds; None if not measured.
        backward: Median time of its backward in milliseconds; None if not measured, or if nothing has a gradient.
        others: Measured kernels that belong to no known region, such as gradients of gradients.
        breaks: Each graph break with its reason and the user's line. Dynamo may count a break twice, for a function
            and for its caller; it is listed once here.
    """

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one HTML page without external files. It shows the model's graph before and after the passes, the
        regions with their kernels and the bytes that they move, and the operations that were not fused.
        """
        html.write(self, path)

    def draw(self, path: str | PathLike[str]) -> None:
        """Draws the model's graph before and after the passes; matplotlib must be installed.

        Args:
            path: The file to write; it ends in ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ValueError: The path has another ending.
            ImportError: matplotlib is not installed.
        """
        draw(self, path)


def explain(model: Any, *args: Any, measure: bool = False, **kwargs: Any) -> Report:
    """Compiles a model, runs it, and reports what the compiler made of it.

    A model that is compiled with a mesh runs in all processes: each must call this function.

    Args:
        model: A module or function, compiled already or not, or a :class:`gnncompile.TrainStep`. Only forward and loss
            of a training step run, so no parameter changes.
        args: Positional inputs of the model.
        measure: Whether to run forward and backward a dozen times more, to time each kernel. A kernel's time is that of
            its launch on a CPU, and the time between two events on a GPU.
        kwargs: Keyword inputs of the model.

    Returns:
        A :class:`Report`; ``print`` it.
    """
    if isinstance(model, TrainStep):
        given = args, {name: value for name, value in kwargs.items() if name != "target"}, kwargs.get("target")
        program, context = objective_of(model)
        with context:
            return _explain(program, given, {}, measure, model.not_recorded)
    model = trained(model)  # the module inside DistributedDataParallel: one process is explained, without the others
    settings = callable_of(model).settings if callable_of(model) is not None else {}  # type: ignore[union-attr]
    target = callable_of(model).target if callable_of(model) is not None else model  # type: ignore[union-attr]
    # Compiled anew, so that earlier calls of the model do not count.
    compiled = compile(target, **settings)
    if is_lazy(target):
        target(*args, **kwargs)  # gives lazy parameters their shapes, as the first call of a compiled model does
    made = callable_of(compiled)
    assert made is not None
    return _explain(made, args, kwargs, measure)


def _explain(
    program: CompiledCallable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    measure: bool,
    not_recorded: str | None = None,
) -> Report:
    names = _parameters(program.target)
    program.backend.observer = lambda: Trace(names)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return program(args, kwargs)

    before = _compat.graph_breaks()
    compiled(*args, **kwargs)
    breaks = _compat.graph_breaks() - before
    syncs, launches = seen(lambda: count_syncs(compiled, args, kwargs))
    device = _device(program.target, args, kwargs)
    times = measure_steps(program, compiled, args, kwargs, device) if measure else None
    return _report(program, device.type, breaks, syncs, launches, times, not_recorded)


def _parameters(target: Any) -> list[str]:
    """Returns the names of the parameters of a module's forward, or of a function."""
    try:
        return list(inspect.signature(target.forward if isinstance(target, torch.nn.Module) else target).parameters)
    except ValueError:  # a function without a signature: the report names its inputs by index
        return []


def _report(
    program: CompiledCallable,
    device: str,
    breaks: int,
    syncs: int,
    launches: Sequence[Launch],
    times: Measured | None,
    not_recorded: str | None,
) -> Report:
    captured = program.backend.captured
    graphs, wanted = _traced(captured)
    records = [r for c in captured for r in c.log.regions]
    launches = launches if times is None else times.launches
    ran = [_kernels(found) for found in assigned(launches, [r.spec for r in records], wanted)]
    unfused = {k: count for graph in graphs for k, count in unfused_bytes(graph.before).items()}
    regions = [_region(r, device, ran[k], unfused.get(k, 0.0)) for k, r in enumerate(records)]
    skipped = [s for c in captured for s in c.log.skipped] + program.backend.notes
    notes = [f"{reason} (reference interpreter)" for reason in launch.fallbacks.values()]
    notes += [f"not recorded: {why}" for why in (not_recorded, *map(_not_recorded, captured)) if why]
    notes += [f"exchanged over parts: {one}" for c in captured for one in c.log.exchanges]
    notes += [
        f"each exchange sends {sum(s.sent):,} of this part's {s.own:,} rows, and receives {sum(s.received):,} halo rows"
        for s in (() if program.check_parts is None else program.check_parts.last)
    ]
    group = program.backend.group
    if group is not None and device == "cuda" and _compat.has_usual_priority(group_of(group)):
        notes.append(USUAL_PRIORITY)
    notes += [f"graph break at {one.line} ({one.reason})" for one in program.backend.breaks]
    if program.empty_is_special:
        notes.append("the model asks whether a tensor is empty: sizes of 0 and 1 are captured on their own")
    if program.derived.wanted:
        notes.append(
            f"number of segments read from the data once per distinct {', '.join(sorted(program.derived.wanted))}"
        )
    return Report(
        regions=tuple(regions),
        skipped=tuple(dict.fromkeys(skipped)),
        graph_breaks=breaks,
        recompiles=max(len(captured) - 1 - breaks, 0),
        host_syncs=syncs,
        captured_graphs=len(captured),
        structure_nodes=sum(c.log.hoisted for c in captured),
        notes=tuple(dict.fromkeys(notes)),
        model=getattr(program.target, "__name__", type(program.target).__name__),
        device=device_of(device).name,
        graphs=tuple(graphs),
        forward=None if times is None else times.forward,
        backward=None if times is None else times.backward,
        others=ran[-1],
        breaks=tuple(program.backend.breaks),
    )


def _traced(captured: Sequence[Captured]) -> tuple[list[ModelGraph], list[tuple[bool, ...]]]:
    """Returns the captured graphs, and for each region a flag per tensor: whether its gradient was wanted."""
    graphs: list[ModelGraph] = []
    wanted: list[tuple[bool, ...]] = []
    for one in captured:
        trace = one.observer
        if isinstance(trace, Trace):
            graphs.append(trace.model_graph(len(wanted)))
            wanted += [trace.wanted.get(k, ()) for k in range(len(one.log.regions))]
    return graphs, wanted


def _kernels(launches: Sequence[Launch]) -> tuple[KernelReport, ...]:
    """Groups launches by program; returns one report for each group."""
    groups: dict[tuple[str, bool], list[Launch]] = {}
    for one in launches:
        groups.setdefault((one.region.spec, one.gradient), []).append(one)
    made = []
    for group in groups.values():
        first, times = group[0], [one.milliseconds for one in group if one.milliseconds is not None]
        generator = first.kernel.generator
        text, code = to_text(first.region), first.kernel.listing
        taken = sum(times) if times else None
        made.append(KernelReport(first.gradient, generator, text, code, len(group), first.moved, first.limit, taken))
    return tuple(made)


def _not_recorded(captured: Captured) -> str | None:
    found = captured.recordings
    return found if found is None or isinstance(found, str) else found.reason


def _region(record: RegionRecord, device: str, kernels: tuple[KernelReport, ...], unfused: float) -> RegionReport:
    region = parse(record.spec)
    kernel = "reference" if (record.spec, device) in launch.fallbacks else device_of(device).generator
    if not kernels:  # no launch was seen: the region is in the structure program, or in a graph for other sizes
        code = launch.kernel(record.spec, device).listing
        kernels = (KernelReport(False, kernel, to_text(region), code, 0, None, None, None),)
    return RegionReport(summary(region), kernel, record.line, record.shape, to_text(region), kernels, unfused)


def _device(target: Any, args: Any, kwargs: Any) -> torch.device:
    """Returns where a model runs: on the device of its parameters or arguments that the host waits for, if any."""
    own = [*target.parameters(), *target.buffers()] if isinstance(target, torch.nn.Module) else []
    tensors = [one for one in (*own, *tree_leaves((args, kwargs))) if isinstance(one, Tensor)]
    return next((t.device for t in tensors if device_of(t.device).host_waits), torch.device("cpu"))


class _SyncCounter(TorchDispatchMode):
    """Counts operations that make the host wait for a value.

    A number that was copied to the host earlier is a tensor on the CPU, and reading it waits for nothing. So once an
    operation works on another device, operations on the CPU don't count.

    Args:
        has_device: Whether the model is known to work on another device. Its compiled code need not show this, since
            it may call kernels without an operation of torch.
    """

    def __init__(self, has_device: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_cpu, self._elsewhere = 0, 0
        self._has_device = has_device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells Dynamo to run compiled code under this mode; by default the model would run uncompiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        elsewhere = any(device_of(one.device).host_waits for one in tensors)
        self._has_device |= elsewhere
        waits = (
            func in _SYNCS
            or _selects(func, args, kwargs or {})
            or (elsewhere and _copies_to_host(func, args, kwargs or {}))
        )
        self._elsewhere += waits and elsewhere
        self._on_cpu += waits and not elsewhere
        return func(*args, **kwargs)

    @property
    def count(self) -> int:
        """How often the host waited for the device."""
        return self._elsewhere if self._has_device else self._on_cpu


def _selects(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation waits for a count: of the elements that a mask selects, or of repetitions."""
    if func in _COUNTED:
        return host_waits(func, args, kwargs)
    if func not in _WRITES or args[2].numel() == 1:
        return False  # writing one number to all selected elements is a masked fill, which needs no count
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _copies_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation on tensors of another device gives a tensor on the CPU, and waits for it."""
    if func is torch.ops.aten._to_copy.default:
        device = kwargs.get("device")
        return device is not None and not device_of(device).host_waits and not kwargs.get("non_blocking")
    if func is torch.ops.aten.copy_.default:
        return not device_of(args[0].device).host_waits and not (len(args) > 2 and args[2])
    return False


def count_syncs(compiled: Any, args: Any, kwargs: Any) -> int:
    """Runs a call and returns its number of device syncs. On a CPU the same operations are counted but cost nothing."""
    with _SyncCounter(device_of(_device(compiled, args, kwargs)).host_waits) as counter:
        compiled(*args, **kwargs)
    return int(counter.count)


_SYNCS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_consecutive.default,
    torch.ops.aten.bincount.default,
    torch.ops.gnncompile.num_segments.default,
    torch.ops.gnncompile.longest_segment.default,
    torch.ops.gnncompile.sorted_index.default,
    torch.ops.gnncompile.dropped_edges.default,
    torch.ops.gnncompile.negative_edges.default,
    torch.ops.gnncompile.other_edges.default,
    torch.ops.gnncompile.matched_edges.default,
    torch.ops.gnncompile.components.default,
    torch.ops.gnncompile.refined_colors.default,
}

_COUNTED = {torch.ops.aten.index.Tensor, torch.ops.aten.repeat_interleave.Tensor}

_WRITES = {
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
