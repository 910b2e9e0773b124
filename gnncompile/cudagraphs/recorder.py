"""The forward and backward of a compiled graph, each captured in full and replayed over the same memory.

An input is read at the address that it had at the capture. If its address differs in each call, the input is copied to
a fixed address. If the graph structure stays the same, it was built before and is kept. If the graph structure changes,
every replay builds it.

Results and gradients are copies, so the next replay overwrites nothing that is still in use. The forward keeps tensors
for its backward; no other forward overwrites them before that backward has run (:class:`Lease`). Results of a padded
mini-batch are copied without their padding.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gnncompile import _compat
from gnncompile.cudagraphs import backward_thread, native
from gnncompile.cudagraphs.cuda_graph import Recorder
from gnncompile.cudagraphs.static_inputs import StaticInputs
from gnncompile.cudagraphs.undo import Undo, Undone
from gnncompile.device import aligned_length
from gnncompile.exc import SecondBackwardError, UnsupportedRegion
from gnncompile.layout import identity_cache
from gnncompile.layout.batch_metadata import current, unpad

SMALL = 2**20
"""The largest size in bytes of a gradient that is copied together with other gradients."""


class Lease:
    """The right to the tensors that a forward left for its backward. It ends with the last reference to the lease."""

    __slots__ = ("__weakref__",)


class CudaGraphSettings(NamedTuple):
    """How recordings are replayed.

    Attributes:
        native: Whether C++ does the work of the host, once the C++ is built (:mod:`gnncompile.cudagraphs.native`).
        backward_in_caller: Whether a backward runs in the thread that asks for it.
    """

    native: bool
    backward_in_caller: bool = False


class Unfinished(NamedTuple):
    """The result of a graph that has a second part.

    Attributes:
        made: The results of the graph.
        finish: Runs the second part. Returns a function that must be called after each replay of the second part.
    """

    made: Any
    finish: Callable[[], Callable[[], None]]


def finished(made: Any) -> Any:
    """Returns the results of a graph, after its second part if it has one."""
    if isinstance(made, Unfinished):
        made.finish()
        return made.made
    return made


class CudaGraphRun:
    """The recording of a graph for one size of its inputs, at fixed addresses.

    Args:
        run: The graph, called with `args`. It returns tensors, numbers and None, or these in an :class:`Unfinished`.
            Kernels that it and its backward need are compiled already.
        args: The inputs of the graph.
        structural: Indices of the inputs from which graph structure is built.
        copied: Indices of the inputs that are copied at each replay.
        mutated: Indices of the inputs to which the graph writes.
        record: Captures the work.
        settings: How the recording is replayed.
        padded: For each result, its padded dimensions and the row type of each; empty if no result is padded.
        over_parts: Whether the graph runs over one part, so that processes must agree on which inputs fit.
        undone: What :attr:`undo` must undo. The inputs among it are small.

    Attributes:
        undo: Undoes what the first part left behind.
        awaits_backward: Whether the backward of the last replay is still to run. Only a pool of a mesh keeps it.

    Raises:
        UnsupportedRegion: A result shares memory with an input, or an input that the graph writes to would be copied.
        RuntimeError: From the capture.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        structural: frozenset[int],
        copied: frozenset[int],
        mutated: frozenset[int],
        record: Recorder,
        settings: CudaGraphSettings,
        padded: Sequence[dict[int, int]] = (),
        over_parts: bool = False,
        undone: Undone = Undone(),  # noqa: B008  (it is never changed)
    ) -> None:
        if copied & mutated:
            raise UnsupportedRegion("an input that it writes to is another tensor in each call")
        self.copied, self._mutated = copied, sorted(mutated)
        # Inputs of kept structure are kept alive, so that no other tensor can take their place.
        self.builds_structure = bool(structural & copied)
        fixed = [(k, args[k]) for k in sorted(structural - copied)]
        self._structural = [(k, a, a._version, _compat.storage_address(a)) for k, a in fixed]
        self._numbers = [(k, a) for k, a in enumerate(args) if not isinstance(a, Tensor)]
        given = {k: a for k, a in enumerate(args) if isinstance(a, Tensor)}
        self._places = [(k, a.data_ptr()) for k, a in given.items() if k not in copied]
        # Parameters are left out: Dynamo has compared their shapes.
        self._sizes = [(k, a.shape, a.stride()) for k, a in given.items() if not isinstance(a, nn.Parameter)]
        self._bytes = _bytes(args)
        self._static = StaticInputs(args, sorted(copied), together=not over_parts)
        # With these alive no other tensor has their addresses, in no process of a mesh.
        self._owned = [a.detach() for k, a in given.items() if over_parts and k not in copied]
        inputs = [self._static.tensors.get(k, a) for k, a in enumerate(args)]
        self._graded = [k for k, a in given.items() if a.requires_grad] if torch.is_grad_enabled() else []
        for k in self._graded:
            # A leaf of its own: an earlier step may have bound the node of the parameter to another stream.
            inputs[k] = inputs[k].detach().requires_grad_()
        _collect_garbage_of_hooks(args)
        self.undo = Undo([args[k] for k in sorted(undone.inputs)], undone.draws_on)
        with identity_cache.keeping() as self._kept:  # structure that was built for these inputs
            self._forward, made = record(lambda: self._run_first_part(run, inputs))
            self._finish: Callable[[], None] | None = None
            if isinstance(made, Unfinished):
                self._finish, self._hand_out = record(made.finish)
                made = made.made
        _check_results(made, inputs)
        self._kind = type(made)
        self._made = [m.detach() if isinstance(m, Tensor) else m for m in made]
        tensors = [m for m in made if isinstance(m, Tensor)]
        self._padded = [dims for m, dims in zip(made, padded, strict=True) if isinstance(m, Tensor)] if padded else []
        self.differentiable = [t.requires_grad for t in tensors]
        self.saved = self._saved_inputs(tensors, args)
        if any(self.differentiable):
            self._record_backward([t for t in tensors if t.requires_grad], [inputs[k] for k in self._graded], record)
        self.last_call = 0
        self.awaits_backward = False
        self._settings = settings
        self._inputs: Any = None
        self._replay: Callable[..., tuple[Tensor, ...]] | None = None
        self._lease: weakref.ref[Lease] | None = None
        self._lock = threading.Lock()

    def _run_first_part(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Runs the first part, for the capture. The inputs that it writes to are copied first."""
        self.undo.copy()
        return run(*inputs)

    def _record_backward(self, made: list[Tensor], leaves: list[Tensor], record: Recorder) -> None:
        self._cotangents = [torch.empty_like(m) for m in made]
        self._backward, self._gradients = record(
            lambda: Gradients(torch.autograd.grad(made, leaves, self._cotangents, allow_unused=True))
        )

    def _saved_inputs(self, made: list[Tensor], args: Sequence[Any]) -> list[int]:
        """Returns the indices of the inputs that the backward reads in the caller's memory.

        The caller must not change these inputs before the backward.
        """
        saved = {t.untyped_storage().data_ptr() for t in _compat.saved_tensors(made)}
        fixed = [k for k, a in enumerate(args) if isinstance(a, Tensor) and k not in self.copied]
        return [k for k in fixed if args[k].untyped_storage().data_ptr() in saved]

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether these inputs are the recorded inputs, or can be copied to the memory of the recording."""
        if self._inputs is not None:
            return self._inputs.fit(args) and self._static.lists_fit(args)
        if not self._fits(args):
            return False
        if self._settings.native and (module := native.module()) is not None:
            kept = [k for k, _, _, _ in self._structural]
            self._inputs = module.Inputs(args, sorted(self.copied), kept, self._static.together)
        return True

    def _fits(self, args: Sequence[Any]) -> bool:
        for k, value in self._numbers:
            if args[k] != value:
                return False
        for k, place in self._places:
            if args[k].data_ptr() != place:
                return False
        for k, shape, stride in self._sizes:
            if args[k].shape != shape or args[k].stride() != stride:
                return False
        for k, _, version, storage in self._structural:
            # Another tensor over the same memory, of a NumPy array say, has a version counter of its own.
            if args[k]._version != version or _compat.storage_address(args[k]) != storage:
                return False
        return self._static.fits(args)

    def fits_unguarded(self, args: Sequence[Any]) -> bool:
        """Whether inputs fit for which no guard was checked yet. Their Python types and dtypes may differ."""
        return _bytes(args) == self._bytes and self.fits(args)

    def lease(self) -> Lease | None:
        """Returns the right to run the recording, or None while a backward is still to come."""
        with self._lock:
            if not self.free:
                return None
            lease = Lease()
            self._lease = weakref.ref(lease)
            return lease

    @property
    def free(self) -> bool:
        """Whether no backward is still to come."""
        return self._lease is None or self._lease() is None

    def release(self) -> None:
        """Ends the lease."""
        self._lease = None

    def __call__(self, args: Sequence[Any], lease: Lease, begun: bool = False) -> Any:
        """Replays the recording on inputs that fit, and returns the results.

        Args:
            args: The inputs.
            lease: The lease from :meth:`lease`.
            begun: Whether :meth:`begin` was called with these inputs.
        """
        if any(self.differentiable):
            tensors = self._differentiable(args, lease)
        else:
            tensors = self.forward(args, begun)
            self.release()
        following = iter(tensors)
        return self._kind([next(following) if isinstance(m, Tensor) else m for m in self._made])

    def _differentiable(self, args: Sequence[Any], lease: Lease) -> tuple[Tensor, ...]:
        """Replays the recording, and adds the results to the graph of autograd."""
        if self._replay is None and self._settings.native and (module := native.module()) is not None:
            self._replay = self._to_cpp(module)
        if self._replay is not None:
            batch = current() if self._padded else None
            return self._replay(args, lease, () if batch is None else batch.counts)
        tensors: tuple[Tensor, ...] = _replay(self, args, lease, *[args[k] for k in self._graded])
        if self._settings.backward_in_caller:
            backward_thread.await_backward(tensors)
        return tensors

    def _to_cpp(self, module: ModuleType) -> Callable[..., tuple[Tensor, ...]]:
        made = [m for m in self._made if isinstance(m, Tensor)]
        padded = [(at, dim, kind) for at, dims in enumerate(self._padded) for dim, kind in dims.items()]
        singles, together = self._static.parts()
        backward_thread.hand_over(module)
        return module.CudaGraphRun(  # type: ignore[no-any-return]
            made=made,
            padded=padded,
            differentiable=self.differentiable,
            graded=self._graded,
            saved=self.saved,
            mutated=self._mutated,
            cotangents=self._cotangents,
            singles=singles,
            together=together,
            forward=self._forward,
            backward=self._backward,
            refuse=_compat.refuse_in_backward,
            refuse_second=_refuse_second,
            gradients=self._gradients.parts(),
            backward_in_caller=self._settings.backward_in_caller and backward_thread.has_thread(made[0]),
        )

    def begin(self, args: Sequence[Any]) -> None:
        """Copies the inputs and launches the first part of the recording."""
        self._static.copy(args)
        self._forward()

    def forward(self, args: Sequence[Any], begun: bool = False) -> tuple[Tensor, ...]:
        """Replays the forward. Returns copies of the resulting tensors, without a gradient."""
        if not begun:
            self.begin(args)
        if self._finish is not None:
            self._finish()
            self._hand_out()
        if self._mutated:
            torch.autograd.graph.increment_version([args[k] for k in self._mutated])
        made = [m for m in self._made if isinstance(m, Tensor)]
        return tuple([m.clone() for m in (unpad(made, self._padded) if self._padded else made)])

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replays the backward. Returns the gradients of the inputs that require a gradient.

        A cotangent may be smaller than the padded result: the rest is filled with zeros.
        """
        for static, given in zip(self._cotangents, cotangents, strict=True):
            if given is None or given.shape != static.shape:
                static.zero_()
            if given is not None:
                static[tuple([slice(size) for size in given.shape])].copy_(given)
        self._backward()
        return self._gradients.copies()


class Gradients:
    """Gradients that every replay writes anew. The small gradients of one dtype share a buffer.

    Args:
        made: The gradients.
    """

    def __init__(self, made: Sequence[Tensor | None]) -> None:
        self._number = len(made)
        self._alone: dict[int, Tensor] = {}
        small: dict[torch.dtype, dict[int, Tensor]] = {}
        for k, gradient in enumerate(made):
            if gradient is not None:
                is_small = gradient.numel() * gradient.element_size() <= SMALL
                (small.setdefault(gradient.dtype, {}) if is_small else self._alone)[k] = gradient
        self._common = [_Common(members) for members in small.values()]

    def parts(self) -> tuple[list[tuple[int, Tensor]], list[tuple[Tensor, list[Any]]]]:
        """Returns the large gradients as ``(index, gradient)``, and each common buffer with a list of its gradients.

        In that list, a gradient is ``(index, sizes, strides, offset)``.
        """
        buffers = [(c.buffer, [(k, *place) for k, place in c.places]) for c in self._common]
        return list(self._alone.items()), buffers

    def copies(self) -> list[Tensor | None]:
        """Returns copies of the gradients, for the caller to keep."""
        found: list[Tensor | None] = [None] * self._number
        for k, gradient in self._alone.items():
            found[k] = gradient.clone()
        for common in self._common:
            common.copy_to(found)
        return found


class _Common:
    """Copies of gradients of one dtype, in one buffer."""

    def __init__(self, members: dict[int, Tensor]) -> None:
        self.places: list[tuple[int, tuple[Any, Any, int]]] = []
        end = 0
        for k, gradient in members.items():
            self.places.append((k, (gradient.shape, _contiguous(gradient.shape), end)))
            end += aligned_length(gradient.numel(), gradient.element_size())
        gradients = [gradient.contiguous() for gradient in members.values()]
        self.buffer = gradients[0].new_empty(end)
        _compat.copy_each([self.buffer.as_strided(*place) for _, place in self.places], gradients)

    def copy_to(self, found: list[Tensor | None]) -> None:
        """Puts views of a copy of the buffer into `found`, by the index of each gradient."""
        buffer = self.buffer.clone()
        for k, place in self.places:
            found[k] = buffer.as_strided(*place)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: CudaGraphRun, args: Sequence[Any], lease: Lease, *graded: Tensor) -> Any:
        made = recording.forward(args)
        ctx.set_materialize_grads(False)
        ctx.recording, ctx.lease, ctx.spent = recording, lease, False
        ctx.mark_non_differentiable(*[m for m, d in zip(made, recording.differentiable, strict=True) if not d])
        # Keeps the inputs alive. Torch raises its own error if an input was changed before the backward.
        ctx.save_for_backward(*[args[k] for k in recording.saved])
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        _compat.refuse_in_backward(cotangents)
        ctx.saved_tensors  # noqa: B018  (reading them makes torch check them)
        recording: CudaGraphRun = ctx.recording
        if ctx.spent:
            _refuse_second()
        ctx.spent = True
        gradients = recording.backward([c for c, d in zip(cotangents, recording.differentiable, strict=True) if d])
        if not _compat.keeps_graph():
            ctx.lease = None
        return None, None, None, *gradients


_replay = _compat.applies(_Replay)


def _refuse_second() -> None:
    raise SecondBackwardError(
        "backward: found a second backward through one forward of a recorded model, whose first has overwritten what "
        'it needs. Compile the model without mode="reduce-overhead".'
    )


def _collect_garbage_of_hooks(args: Sequence[Any]) -> None:
    """Collects garbage, which may hold the node of a parameter with a hook. The node belongs to an earlier stream."""
    if any(isinstance(a, nn.Parameter) and _compat.has_hooks(a) for a in args):
        gc.collect()


def _bytes(args: Sequence[Any]) -> list[int | None]:
    return [a.nbytes if isinstance(a, Tensor) else None for a in args]


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _check_results(made: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raises UnsupportedRegion for a result that is an input or a view of an input: its copy would not be."""
    given = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)} - {0}
    if any(isinstance(m, Tensor) and m.untyped_storage().data_ptr() in given for m in made):
        raise UnsupportedRegion("a result shares memory with an input")
