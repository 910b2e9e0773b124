"""Chooses which sizes of a captured graph are recorded, and when a recording is replayed."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.cudagraphs import cuda_graph, native
from gnncompile.cudagraphs.recorder import CudaGraphRun, CudaGraphSettings, Lease, finished
from gnncompile.cudagraphs.undo import Undone
from gnncompile.exc import UnsupportedRegion
from gnncompile.layout import bad_indices

logger = logging.getLogger(__name__)

WARM = 2
"""The number of runs of one size before it is recorded.

By then kernels are compiled, and the host knows the hubs of the graph.
"""

OFTEN = 2
"""An input whose address has changed this many times is copied to the recording at each replay."""

LONG = 64
"""A recording that was not replayed in this many calls may be dropped for another one.

A new recording costs as much as many steps.
"""

LOOK_EVERY = 32
"""The number of calls between two checks of recordings that build structure for an index outside of the graph."""

TRIES = 3
"""The number of attempts to record a graph whose captures are broken by something else in the process."""

MOST_SEEN = 256
"""The largest number of sizes whose runs are remembered."""


@dataclass
class Seen:
    """The runs with inputs of one size.

    Attributes:
        owners: References that keep the addresses by which these inputs are known from being used again.
    """

    context: Any
    places: list[Any] = field(default_factory=list)
    moved: Counter[int] = field(default_factory=Counter)
    mutated: set[int] = field(default_factory=set)
    runs: int = 0
    awaits_backward: bool = False
    refused: bool = False
    owners: list[Any] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether this size may be recorded."""
        return self.runs >= WARM and not self.awaits_backward and not self.refused

    def look(self, places: list[Any]) -> None:
        """Compares the addresses of the inputs with the addresses in the last run.

        For inputs from which structure is built, the versions and storages are compared as well.
        """
        rarely = False
        for k, (old, new) in enumerate(zip(self.places, places, strict=False)):
            if old != new:
                self.moved[k] += 1
                rarely |= self.moved[k] < OFTEN
        self.places = places
        if rarely:
            self.runs = 0

    @property
    def copied(self) -> frozenset[int]:
        """Indices of the inputs that have another address in each call."""
        return frozenset(k for k, times in self.moved.items() if times >= OFTEN)


@dataclass
class Begun:
    """A replay whose first part was launched.

    Attributes:
        recording: The recording.
        args: The inputs.
        context: The context for which the replay is valid.
        lease: The right to the recording.
        is_open: Whether the replay was neither ended nor undone.
    """

    recording: CudaGraphRun
    args: Sequence[Any]
    context: Any
    lease: Lease
    is_open: bool = True

    def undo(self) -> None:
        """Undoes what the first part left behind, and gives the recording back. Does nothing if it is too late."""
        if self.is_open:
            self.is_open = False
            self.recording.undo()
            self.recording.release()


class CudaGraphPool:
    """Runs a graph, by replay if possible.

    Args:
        run: The graph, called with its inputs. If it returns an :class:`~gnncompile.cudagraphs.recorder.Unfinished`,
            its first part may be launched before it is known to be wanted.
        most: The largest number of recordings. Beyond it, further sizes run without a recording.
        device: The device of the graph.
        structural: Indices of the inputs from which graph structure is built, which caches remember. A recording is for
            these very tensors, unchanged, or builds the structure anew in every replay.
        settings: How recordings are replayed.
        padded: As for :class:`~gnncompile.cudagraphs.recorder.CudaGraphRun`. Results of runs without a recording keep
            their padding.
        undone: What must be undone if a first part was launched in vain.

    Attributes:
        reason: Why the graph is not recorded (any more), or None.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        most: int,
        device: torch.device,
        structural: Iterable[int],
        settings: CudaGraphSettings,
        padded: Sequence[dict[int, int]] = (),
        undone: Undone = Undone(),  # noqa: B008  (it is never changed)
    ) -> None:
        self.run, self.most, self.device, self.structural = run, most, device, frozenset(structural)
        self.settings, self.padded, self.undone = settings, padded, undone
        if settings.native:
            native.prepare()
        self.recorded: list[tuple[Seen, CudaGraphRun]] = []
        self.reason: str | None = None
        self._calls = 0
        self._context: tuple[Any, Any] | None = None
        self._builds_structure = True
        self._broken = 0
        self._seen: OrderedDict[Any, Seen] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, args: Sequence[Any]) -> Begun | None:
        """Launches the first part of a recording that fits these inputs, if all else is as in the last call.

        The device then has work while the host finds out whether all else is as in the last call. Returns None if no
        recording fits.

        Args:
            args: The inputs that the graph is expected to get.
        """
        where = cuda_graph.context(self.device) if self.reason is None else None
        if where is None or self._context is None or self._context[0] != where:
            return None
        for seen, recording in reversed(self.recorded):
            if seen.context == self._context and recording.fits_unguarded(args):
                lease = recording.lease()
                if lease is not None:
                    recording.undo.begin()
                    recording.begin(args)
                    return Begun(recording, args, seen.context, lease)
        return None

    def __call__(
        self, args: Sequence[Any], facts: Any = None, begun: Begun | None = None, memory: int | None = None
    ) -> Any:
        """Returns the results of the graph.

        Args:
            args: The inputs of the graph: tensors and numbers.
            facts: Other values on which a recording depends.
            begun: The replay that :meth:`begin` launched with the expected inputs, if any. It stays open if it raises.
            memory: The address of the memory of the inputs, if later inputs will be there too. Each such memory gets a
                recording that reads the inputs in place, while these recordings are at most half of all.
        """
        where = cuda_graph.context(self.device) if self.reason is None else None
        if begun is not None and not (begun.context == (where, facts) and all(map(_is_the_same, begun.args, args))):
            begun.undo()
            begun = None
        _compat.refuse_tangents(args)
        if where is None:
            return finished(self.run(*args))
        bad_indices.check_pending()
        context = self._context = where, facts
        self._calls += 1
        if begun is not None:
            begun.is_open = False
            return self._replay(begun.recording, args, begun.lease, begun=True)
        for seen, recording in reversed(self.recorded):
            if seen.context == context and recording.fits(args):
                lease = self._lease(recording)
                if lease is not None:
                    return self._replay(recording, args, lease)
        with self._lock:
            has_room = 2 * (len(self.recorded) + 1) <= self.most
            seen = self._look(args, context, memory if has_room else None)
            new = self._record(seen, args) if seen.ready else None
            lease = new.lease() if new is not None else None
        return self._run(seen, args) if new is None or lease is None else self._replay(new, args, lease)

    def _lease(self, recording: CudaGraphRun) -> Lease | None:
        return recording.lease()

    def _replay(self, recording: CudaGraphRun, args: Sequence[Any], lease: Lease, begun: bool = False) -> Any:
        recording.last_call = self._calls
        if recording.builds_structure and self._calls % LOOK_EVERY == 0:
            bad_indices.look(self.device)
        return recording(args, lease, begun)

    def _look(self, args: Sequence[Any], context: Any, memory: int | None) -> Seen:
        sizes = tuple([(a.shape, a.stride()) if isinstance(a, Tensor) else a for a in args])
        seen = self._seen_as((context, sizes, memory), context)
        places: list[Any] = [a.data_ptr() if isinstance(a, Tensor) else 0 for a in args]
        for k in self.structural:
            places[k] = places[k], _version(args[k]), _storage(args[k])
        seen.look(places)
        return seen

    def _seen_as(self, key: Any, context: Any) -> Seen:
        """Returns the runs of a key; forgets the runs of the key that was not met for longest."""
        seen = self._seen.setdefault(key, Seen(context))
        self._seen.move_to_end(key)
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return seen

    def _run(self, seen: Seen, args: Sequence[Any]) -> Any:
        versions = [_version(a) for a in args]
        made = finished(self.run(*args))
        seen.mutated |= {k for k, a in enumerate(args) if _version(a) != versions[k]}
        seen.runs += 1
        node = next((m.grad_fn for m in made if isinstance(m, Tensor) and m.grad_fn is not None), None)
        seen.awaits_backward = node is not None
        if node is not None:
            node.register_hook(lambda *_: setattr(seen, "awaits_backward", False))
        return made

    def _record(self, seen: Seen, args: Sequence[Any]) -> CudaGraphRun | None:
        seen.runs = 0  # in any case, the next attempt is some runs away
        # A change of a tensor without a version counter would not be noticed.
        copied = seen.copied | {k for k in self.structural if isinstance(args[k], Tensor) and args[k].is_inference()}
        if copied & self.structural and not self._builds_structure:
            return None
        self._make_room(seen, copied)
        if len(self.recorded) >= self.most:
            return None
        record = cuda_graph.recorder(self.device)
        try:
            mutated = frozenset(seen.mutated)
            structural = self._tensors(args)
            recording = CudaGraphRun(
                self.run, args, structural, copied, mutated, record, self.settings, self.padded, undone=self.undone
            )
        except (UnsupportedRegion, RuntimeError) as reason:
            self._refuse(seen, reason, bool(copied & self.structural))
            return None
        self.recorded.append((seen, recording))
        return recording

    def _tensors(self, args: Sequence[Any]) -> frozenset[int]:
        return frozenset(k for k in self.structural if isinstance(args[k], Tensor))

    def _make_room(self, seen: Seen, copied: frozenset[int]) -> None:
        """Drops recordings of the same size that copy fewer inputs.

        If the pool is still full, it drops the least recently replayed recording, unless the last :data:`LONG` calls
        replayed it.
        """
        for known in list(self.recorded):
            if known[0] is seen and known[1].copied < copied and known[1].free:
                self.recorded.remove(known)
        if len(self.recorded) >= self.most:
            oldest = min(self.recorded, key=lambda known: known[1].last_call)
            if oldest[1].free and self._calls - oldest[1].last_call > LONG:
                self.recorded.remove(oldest)

    def _refuse(self, seen: Seen, reason: BaseException, builds_structure: bool) -> None:
        reason, text = first_error(reason)
        # No operation of the graph raised an error, so something else in the process broke the capture.
        if _compat.is_broken_capture(reason) and self._broken < TRIES - 1:
            self._broken += 1
            logger.info("a capture is tried again: %s", text)
            return
        seen.refused = True
        logger.warning("a graph is not recorded: %s", text)
        if isinstance(reason, torch.OutOfMemoryError):
            self.recorded = [known for known in self.recorded if not known[1].free]
        elif builds_structure:
            self._builds_structure = False
        else:
            self.reason = text


def first_error(error: BaseException) -> tuple[BaseException, str]:
    """Returns the error that broke a capture, if it is known, and its first line.

    The end of a broken capture raises another error.
    """
    while _compat.is_broken_capture(error) and error.__context__ is not None:
        error = error.__context__
    return error, str(error).strip().splitlines()[0]


def _is_the_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is int and one == other)


def _storage(value: Any) -> int:
    return _compat.storage_address(value) if isinstance(value, Tensor) else 0


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1
