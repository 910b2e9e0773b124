"""The Dynamo backend: runs the passes on a captured graph, compiles the result with Inductor, and joins both parts."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from gnncompile import _compat
from gnncompile._compat.inductor import OwnPass
from gnncompile.capture import graph_outputs, higher_order, opaque_graphs
from gnncompile.capture.provenance import attributes_of, kept_inputs, uneven_sources, written_tensors
from gnncompile.capture.undefined_grads import with_undefined_grads
from gnncompile.cudagraphs import eligibility
from gnncompile.cudagraphs.backward_thread import in_caller
from gnncompile.cudagraphs.parameter_aliases import with_parameter_aliases
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.exc import PartitionError
from gnncompile.layout.agreement import same_exchanges, tell_failure
from gnncompile.layout.batch_metadata import unpad
from gnncompile.layout.halo import group_of
from gnncompile.layout.structure_program import StructureCache
from gnncompile.ops import (
    device_layouts,
    embedding,
    exchange_lowering,
    gemm_arithmetic_lowering,
    gemm_lowering,
    gradient,
    launch,
    matrix_copies,
    moments,
    own_and_halo_lowering,
    packaged,
    prepared,
    region_lowering,
    seal,
    sorted_edges,
    stored,
)
from gnncompile.ops.structure import without_dispatcher
from gnncompile.options import Options
from gnncompile.passes import manager
from gnncompile.passes.analysis import draws_on
from gnncompile.passes.log import PassLog, Skip, line_of, not_padded
from gnncompile.passes.partitioned.fingerprint import exchanges_of
from gnncompile.passes.partitioned.parts import REMEDY, Parts
from gnncompile.substitutes import install

SHARDED = "its parameters are sharded (fully_shard), and stand elsewhere in the backward"
"""The reason that a graph of a sharded model is not recorded as a CUDA graph."""


@dataclass
class Captured:
    """One captured graph.

    Attributes:
        log: The log of the passes.
        structure: The cache of the graph structure that it computes; None if it computes none.
        recordings: Its CUDA graph recordings, or the reason that it has none; None if recording is off.
        observer: The observer that watched the passes.
        written: The tensors that a run of the graph writes to, besides its results. None if it leaves more behind.
        draws_on: The devices on which it draws random numbers.
        kept: The positions of the graph's inputs that are attributes of the model.
        attributes: The tensors that the model's attributes among them were at the capture, with their sources.
    """

    log: PassLog
    structure: StructureCache | None
    recordings: CudaGraphPool | str | None = None
    observer: manager.Observer | None = None
    written: list[weakref.ref[Tensor]] | None = None
    draws_on: set[torch.device] = field(default_factory=set)
    kept: frozenset[int] = frozenset()
    attributes: list[tuple[str, weakref.ref[Tensor]]] = field(default_factory=list)


@dataclass(repr=False)
class Backend(_compat.CaptureSettings):
    """Compiles captured graphs. Each compiled model has its own backend, with its own reports and modes.

    Attributes:
        options: The options of gnncompile.
        inductor: Inductor's settings.
        self_loops: How removed self loops are traced: "masked", "exact", or "off" (all PyG code is traced as written).
            The substitutes read this while Dynamo traces.
        attaches_sizes: Whether the caller can attach a missing number of segments to an argument and trace again.
        strict: Whether an error of a pass or of a compiler is raised.
        tell: Called for a graph that could not be compiled as usual: :meth:`CapturePolicy.tell`.
        makes_matrices: Whether sparse matrices that the model makes are captured.
        captures_gradients: Whether a call of ``torch.autograd.grad`` in the model is part of the captured graph.
        narrows: Whether results of padded mini-batches may be narrowed to their valid rows.
        asked: The inputs whose number of segments was requested: pairs of the input's source, and whether the length
            of the longest segment was requested too. Where the caller can't attach them, every step reads the data.
        captured: The graphs that were captured, in order.
        notes: The parts that were not compiled as usual, for ``explain``.
        breaks: The graph breaks.
        observer: Makes an observer that watches the passes on one captured graph.
        modules: Returns the modules whose parameters the captured graphs read.
        watched: Layers whose hooks are checked before each call.
        group: The process group over which one graph is partitioned, by name; None for whole graphs.
        finish: Takes each graph after the passes in Inductor's place, and returns a function that runs it.
    """

    options: Options
    inductor: dict[str, Any]
    self_loops: str = "masked"
    attaches_sizes: bool = False
    strict: bool = False
    tell: Callable[..., None] | None = None
    makes_matrices: bool = False
    narrows: bool = True
    captures_gradients: bool = True
    asked: set[tuple[str, bool]] = field(default_factory=set)
    captured: list[Captured] = field(default_factory=list)
    notes: list[Skip] = field(default_factory=list)
    breaks: list[Skip] = field(default_factory=list)
    observer: Callable[[], manager.Observer] | None = None
    modules: Callable[[], Sequence[nn.Module]] = tuple
    watched: Container[nn.Module] = ()
    group: str | None = None
    finish: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None = None

    def __repr__(self) -> str:
        return "gnncompile"  # Dynamo's errors name the backend by this

    def note_break(self, reason: str, trace: str) -> None:
        """Notes a graph break, its reason and its place, once. Dynamo reports it again for each enclosing frame."""
        found = Skip("graph break", reason, line_of(trace))
        if found not in self.breaks:
            self.breaks.append(found)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compiles one captured graph for Dynamo. If a pass fails, the graph is compiled without the passes."""
        given = graph_outputs.take_out(gm) if _compat.takes_arguments() and opaque_graphs.why_opaque(gm) is None else []
        return graph_outputs.put_back(self._compiled(gm, inputs), given)

    def _compiled(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        before = len(self.captured)
        try:
            return self._with_passes(gm, inputs)
        except Exception as error:
            if self.strict or self.tell is None or _compat.steers_dynamo(error):
                raise
            del self.captured[before:]
            self._leave_opaque(gm, Skip("a whole graph", _compat.reason_of(error), _compat.place_of(error)))
            self.tell("a captured graph", "runs without the passes", error)
            return self._with_recordings(self._compile(gm, inputs), gm, inputs, Captured(PassLog(), None))

    def _with_passes(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        observer = None if self.observer is None else self.observer()
        if graph_outputs.is_empty(gm):
            self.captured.append(Captured(PassLog(), None))
            return lambda *args: ()
        result = self._optimise(gm, observer) if self.group is None else self._agreed(self.group, gm, observer)
        kept = kept_inputs(gm)
        attributes = attributes_of(gm, inputs, kept)
        if result is None:
            captured = Captured(PassLog(), None, kept=kept, attributes=attributes)
            return self._with_recordings(self._compile(gm, inputs), gm, inputs, captured)
        if result.structure is None:
            captured = Captured(result.log, None, observer=observer, kept=kept, attributes=attributes)
            return self._with_recordings(self._compile(result.rest, inputs), result.rest, inputs, captured)
        mode = _compat.backend_fake_mode()
        with mode:
            made = [torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in result.structure.results]
        device_layouts.compile_ahead(result.structure.module.graph)
        compiled = self._compile(result.rest, [*inputs, *made])
        # All processes build structures together, so they must forget the same ones. The sizes in bytes differ.
        most_bytes = self.options.structure_cache_bytes if self.group is None else sys.maxsize
        run = without_dispatcher(result.structure.module)
        structure = StructureCache(result.structure, run, self.options.structure_cache_entries, most_bytes)
        captured = Captured(result.log, structure, observer=observer, kept=kept, attributes=attributes)
        return self._with_recordings(compiled, result.rest, inputs, captured)

    def _with_recordings(
        self, compiled: Callable[..., Any], gm: fx.GraphModule, inputs: Sequence[Any], captured: Captured
    ) -> Callable[..., Any]:
        self.captured.append(captured)
        captured.written, captured.draws_on = written_tensors(gm, inputs), draws_on(gm.graph)
        results = captured.log.padded or []
        padded = results if any(results) else []
        if padded and not self.narrows:
            raise not_padded("the loss function returns rows of a padded mini-batch")
        whole = self._recorded(compiled, gm, inputs, captured, padded)
        sources = uneven_sources(gm)
        if sources is not None:
            for position, _ in () if captured.structure is None else captured.structure.program.copied:
                sources.insert(position, frozenset())  # copies of graph structure have no gradient
            whole = with_undefined_grads(whole, sources, captured.kept)
        return (lambda *args: unpad(whole(*args), padded)) if padded else whole

    def _recorded(
        self,
        compiled: Callable[..., Any],
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        captured: Captured,
        padded: Sequence[dict[int, int]],
    ) -> Callable[..., Any]:
        structure = captured.structure
        copied = [] if structure is None else [graph_outputs.Copied(*pair) for pair in structure.program.copied]
        whole = graph_outputs.copy_structure(compiled, copied)

        def run(*args: Any) -> Any:
            _compat.refuse_tangents(args)
            given = with_parameter_aliases(args)
            return compiled(*given) if structure is None else whole(given, structure(args))

        if self.options.backward_in_caller:
            run = in_caller(run)
        if not self.options.record:
            return run
        if _compat.are_sharded(self.modules()):
            captured.recordings = SHARDED
            return run
        structural = structure.program.inputs if structure is not None else ()
        found = eligibility.recordings(run, gm, inputs, structural, padded, self.options, self.group, captured.kept)
        captured.recordings = found
        return run if isinstance(found, str) else lambda *args: found(args)

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.finish is not None:
            return self.finish(gm, inputs)
        if self.options.double_backward:
            return gm.forward  # regions and torch's ops are both differentiable twice
        if not self.options.inductor:
            return _compat.run_op_by_op(gm, inputs)
        try:
            return _compat.compile_inductor(gm, inputs, self._patches())
        except Exception as error:
            if self.tell is None or _compat.steers_dynamo(error):
                raise
            return self._compile_otherwise(gm, inputs, error)

    def _compile_otherwise(self, gm: fx.GraphModule, inputs: Sequence[Any], error: BaseException) -> Callable[..., Any]:
        """Compiles a graph that failed in Inductor: first without fused loops, else operation by operation."""
        assert self.tell is not None
        what = "what is left of a captured graph"
        try:
            compiled = _compat.compile_inductor(gm, inputs, {**self._patches(), **_compat.unfused_settings()})
        except Exception as again:
            if self.strict or _compat.steers_dynamo(again):
                raise error from None
            self.tell(what, "runs operation by operation", error)
            return _compat.run_op_by_op(gm, inputs)
        self.tell(what, "is compiled without fused loops", error, raised=False)
        return compiled

    def _optimise(self, gm: fx.GraphModule, observer: manager.Observer | None) -> manager.Result | None:
        if not any(isinstance(f, Tensor) for f in _compat.placeholders_as_fakes(gm)):
            return None
        _compat.drop_leaf_marks(gm)
        higher_order.inline_checkpoints(gm)
        reason = opaque_graphs.why_opaque(gm)
        if reason is not None:
            if self.group is not None:
                raise PartitionError(f"the model can't run over a part of a graph: {reason}. {REMEDY}")
            self._leave_opaque(gm, Skip("a whole graph", reason, "?"))
            return None
        for body in higher_order.bodies(gm):
            self._write_out(body, Skip("a nested graph", "its layers are captured as PyG wrote them", "?"))
        gradient.mark(gm)
        higher_order.hide(gm)
        try:
            with _compat.without_saved_hooks():
                parts = None if self.group is None else self._parts(gm)
                result = manager.run_pre_grad(gm, self.options, observer, self._leads_on(gm), parts)
            higher_order.show(result.rest)
            return result
        finally:
            higher_order.forget(gm)

    def _agreed(self, group: str, gm: fx.GraphModule, observer: manager.Observer | None) -> manager.Result | None:
        """The same over parts, where all processes must find the same exchanges.

        Raises:
            PartitionError: A process failed or found other exchanges. All processes raise it.
        """
        try:
            result = self._optimise(gm, observer)
        except Exception as error:
            if not _compat.steers_dynamo(error) and not isinstance(error, _compat.Recapture):
                tell_failure(group, error)
            raise
        if result is not None:
            graphs = (
                [result.rest.graph] if result.structure is None else [result.structure.module.graph, result.rest.graph]
            )
            same_exchanges(group, exchanges_of(graphs))
        return result

    def _parts(self, gm: fx.GraphModule) -> Parts:
        """Returns what the passes know of a graph that runs over one part.

        Raises:
            PartitionError: A number of rows was captured as a fixed number, so rows can't be told from features.
        """
        assert self.group is not None
        kept = kept_inputs(gm)
        for position, fake in enumerate(_compat.placeholders_as_fakes(gm)):
            if position not in kept and isinstance(fake, Tensor) and fake.dim() and isinstance(fake.shape[0], int):
                raise PartitionError(
                    f"an argument was captured for {fake.shape[0]} rows only, because the model branches on that "
                    f"number or another capture failed. {REMEDY}"
                )
        return Parts(self.group, dist.get_world_size(group_of(self.group)))

    def _leads_on(self, gm: fx.GraphModule) -> bool:
        """Whether another graph may read this graph's results. A recorded graph copies its results itself."""
        return not self.options.record and not (_compat.takes_arguments() and _compat.is_whole(gm))

    def _leave_opaque(self, gm: fx.GraphModule, why: Skip) -> None:
        """Prepares a graph that the passes can't rewrite for Inductor, and notes the reason."""
        if why not in self.notes:
            self.notes.append(why)
        self._write_out(gm, why)

    def _write_out(self, gm: fx.GraphModule, why: Skip) -> None:
        """Replaces the marker ops in a graph and its nested graphs by torch ops.

        Raises:
            Recapture: The graph takes a padded mini-batch, holds a sparse matrix, or calls ``torch.autograd.grad``. Or
                a marker has no torch op, and the graph must be captured again without substitutes.
        """
        markers = opaque_graphs.markers(gm)
        if any(map(_compat.gradient_calls, (gm, *higher_order.bodies(gm)))):
            raise _compat.gradient_not_captured(why.reason)
        if torch.ops.gnncompile.padded in markers:
            raise not_padded("a part of the model is captured as a whole graph of its own")
        if torch.ops.gnncompile.adjacency in markers:
            raise _compat.needs_original("torch.func, checkpoint or control flow")
        if not opaque_graphs.written_out(gm):
            raise _compat.Recapture(_compat.Setting.SELF_LOOPS, "off", why.reason, why.what, why.line)

    def _patches(self) -> dict[str, Any]:
        return {
            "joint_custom_post_pass": BeforeDivision(self.options),
            "post_grad_custom_pre_pass": AfterDifferentiation(self.options),
            # Inductor's padding of matrices compares sizes with 1. That becomes a guard, and a single node a recompile.
            "shape_padding": False,
            # Size asserts on every intermediate cost more host time than a kernel launch.
            "size_asserts": False,
            # Another order could end an exchange before the work that it is to overlap with.
            **({} if self.group is None else {"reorder_for_peak_memory": False}),
            # Our kernels are called from Python, so the C++ wrapper stays off even if the user turned it on.
            "cpp_wrapper": False,
            **self.inductor,
        }


class _OwnPasses(OwnPass):
    """Passes of gnncompile's within Inductor.

    The uuid puts a hash of our sources into the key of Inductor's caches, so a new version never reads an old gradient.
    It holds the dtypes of autocast too: torch 2.11 takes a graph from its cache that was made for another dtype.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.keeps_memory = options, options.keep_memory

    def uuid(self) -> str:
        """The part of Inductor's cache key: a hash of our sources, the options, and autocast's dtypes."""
        types = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        return f"{sources_hash()} {self.options!r} {types}"


class BeforeDivision(_OwnPasses):
    """Runs the passes on the graph of a forward and its backward, before it is divided into both."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph."""
        manager.run_joint(graph, self.options)


class AfterDifferentiation(_OwnPasses):
    """Runs the post-grad passes, then makes the graph call regions without their autograd layer."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph of a forward or a backward, for Inductor."""
        manager.run_post_grad(graph, self.options)
        for node in graph.find_nodes(op="call_function", target=torch.ops.gnncompile.region.default):
            node.target = torch.ops.gnncompile.region_kernel.default
        prepared.begin(graph)


@lru_cache(maxsize=1)
def sources_hash() -> str:
    """A SHA-256 hash of all source files of gnncompile."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def prepare_torch() -> None:
    """Registers substitutes and the lowerings of our ops with torch, and applies patches, at the first compile."""
    install.install()
    embedding.install()
    gemm_lowering.install()
    gemm_arithmetic_lowering.install()
    region_lowering.install()
    matrix_copies.install()
    moments.install()
    exchange_lowering.install()
    own_and_halo_lowering.install()
    packaged.install()
    launch.install()
    seal.install()
    sorted_edges.install()
    stored.install()
    prepared.install()
