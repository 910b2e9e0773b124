"""Chooses what of a captured graph is recorded, and when a recording is replayed."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.cudagraphs import cuda_graph, native
from gnncompile.cudagraphs.recorder import CudaGraphRun, CudaGraphSettings, Lease, finished
from gnncompile.exc import UnsupportedRegion
from gnncompile.layout import csr

logger = logging.getLogger(__name__)

WARM = 2
"""Runs of one size before it is recorded: kernels are compiled, the hubs of the graph are known to the host."""

OFTEN = 2
"""An input that was found in another place so often is copied to the recording at each replay."""

LONG = 64
"""Calls for which a recording was not replayed before it makes room for another, which costs as much as many steps."""

LOOK_EVERY = 32
"""Calls after which it is asked whether one that builds structure met an index outside its graph."""

BROKEN = "previous error during capture"
"""CUDA says so at the end of a capture that something broke: if no operation of the graph raised anything, something
else in the process.
"""

TRIES = 3
"""Of a graph whose captures are broken so."""

MOST_SEEN = 256
"""Sizes that are remembered though they are not recorded."""


@dataclass
class _Seen:
    """What was seen of one size."""

    context: Any
    places: list[Any] = field(default_factory=list)
    moved: Counter[int] = field(default_factory=Counter)
    mutated: set[int] = field(default_factory=set)
    runs: int = 0
    awaits_backward: bool = False
    refused: bool = False

    @property
    def ready(self) -> bool:
        """Whether it may be recorded."""
        return self.runs >= WARM and not self.awaits_backward and not self.refused

    def look(self, places: list[Any]) -> None:
        """Compares where the inputs are, and the versions of those that structure is built of, with what they were."""
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
        """Positions of the inputs that come from elsewhere each time."""
        return frozenset(k for k, times in self.moved.items() if times >= OFTEN)


class Begun(NamedTuple):
    """A replay whose first part was launched.

    Attributes:
        recording: Of what.
        args: The inputs.
        context: What it is for.
        lease: The right to it.
    """

    recording: CudaGraphRun
    args: Sequence[Any]
    context: Any
    lease: Lease


class CudaGraphPool:
    """Runs a graph, by replay where it can.

    Args:
        run: The graph: called with its inputs. What returns an :class:`~gnncompile.cudagraphs.recorder.Unfinished` may
            be begun before it is known to be what is wanted.
        most: How many recordings are kept; when there are so many, further sizes run as they are.
        device: What the graph works on.
        structural: Positions of the inputs that graph structure is built of, which caches remember: a recording is
            for these very tensors, unchanged, or builds it anew in every replay.
        settings: How recordings are replayed.
        padded: As of :class:`~gnncompile.cudagraphs.recorder.CudaGraphRun`; what runs as it is keeps its padding.

    Attributes:
        reason: Why nothing is recorded (any more), if so.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        most: int,
        device: torch.device,
        structural: Iterable[int],
        settings: CudaGraphSettings,
        padded: Sequence[dict[int, int]] = (),
    ) -> None:
        self.run, self.most, self.device, self.structural = run, most, device, frozenset(structural)
        self.settings, self.padded = settings, padded
        if settings.native:
            native.prepare()
        self.recorded: list[tuple[_Seen, CudaGraphRun]] = []
        self.reason: str | None = None
        self._calls = 0
        self._context: tuple[Any, Any] | None = None
        self._builds_structure = True
        self._broken = 0
        self._seen: OrderedDict[Any, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, args: Sequence[Any]) -> Begun | None:
        """Launches the first part of a recording that fits these inputs, if all else is as in the last call: the device
        has work while the host finds out whether it is. None where there is none.

        Args:
            args: The graph's inputs, as they are expected to be.
        """
        where = cuda_graph.context(self.device) if self.reason is None else None
        if where is None or self._context is None or self._context[0] != where:
            return None
        for seen, recording in reversed(self.recorded):
            if seen.context == self._context and recording.fits_unguarded(args):
                lease = recording.lease()
                if lease is not None:
                    recording.begin(args)
                    return Begun(recording, args, seen.context, lease)
        return None

    def __call__(self, args: Sequence[Any], facts: Any = None, begun: Begun | None = None) -> Any:
        """The graph's results.

        Args:
            args: Its inputs: tensors and numbers.
            facts: What else a recording depends on.
            begun: What was begun with what was expected.
        """
        _compat.refuse_tangents(args)
        where = cuda_graph.context(self.device) if self.reason is None else None
        if where is None:
            return finished(self.run(*args))
        csr.check_pending()
        context = self._context = where, facts
        self._calls += 1
        if begun is not None:
            if begun.context == context and all(map(_is_the_same, begun.args, args)):
                return self._replay(begun.recording, args, begun.lease, begun=True)
            begun.recording.release()
        for seen, recording in reversed(self.recorded):
            if seen.context == context and recording.fits(args):
                lease = recording.lease()
                if lease is not None:
                    return self._replay(recording, args, lease)
        with self._lock:
            seen = self._look(args, context)
            new = self._record(seen, args) if seen.ready else None
            lease = new.lease() if new is not None else None
        return self._run(seen, args) if new is None or lease is None else self._replay(new, args, lease)

    def _replay(self, recording: CudaGraphRun, args: Sequence[Any], lease: Lease, begun: bool = False) -> Any:
        recording.last_call = self._calls
        if recording.builds_structure and self._calls % LOOK_EVERY == 0:
            csr.look(self.device)
        return recording(args, lease, begun)

    def _look(self, args: Sequence[Any], context: Any) -> _Seen:
        sizes = tuple([(a.shape, a.stride()) if isinstance(a, Tensor) else a for a in args])
        seen = self._seen.setdefault((context, sizes), _Seen(context))
        self._seen.move_to_end((context, sizes))
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        places: list[Any] = [a.data_ptr() if isinstance(a, Tensor) else 0 for a in args]
        for k in self.structural:
            places[k] = places[k], _version(args[k]), _storage(args[k])
        seen.look(places)
        return seen

    def _run(self, seen: _Seen, args: Sequence[Any]) -> Any:
        versions = [_version(a) for a in args]
        made = finished(self.run(*args))
        seen.mutated |= {k for k, a in enumerate(args) if _version(a) != versions[k]}
        seen.runs += 1
        node = next((m.grad_fn for m in made if isinstance(m, Tensor) and m.grad_fn is not None), None)
        seen.awaits_backward = node is not None
        if node is not None:
            node.register_hook(lambda *_: setattr(seen, "awaits_backward", False))
        return made

    def _record(self, seen: _Seen, args: Sequence[Any]) -> CudaGraphRun | None:
        seen.runs = 0  # whatever comes of it, the next attempt is some runs away
        # A change of tensors without a version counter would not be noticed.
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
            recording = CudaGraphRun(self.run, args, structural, copied, mutated, record, self.settings, self.padded)
        except (UnsupportedRegion, RuntimeError) as reason:
            self._refuse(seen, reason, bool(copied & self.structural))
            return None
        self.recorded.append((seen, recording))
        return recording

    def _tensors(self, args: Sequence[Any]) -> frozenset[int]:
        return frozenset(k for k in self.structural if isinstance(args[k], Tensor))

    def _make_room(self, seen: _Seen, copied: frozenset[int]) -> None:
        """Drops recordings of the same size that copy less, and beyond the bound what was not replayed for long."""
        for known in list(self.recorded):
            if known[0] is seen and known[1].copied < copied and known[1].free:
                self.recorded.remove(known)
        if len(self.recorded) >= self.most:
            oldest = min(self.recorded, key=lambda known: known[1].last_call)
            if oldest[1].free and self._calls - oldest[1].last_call > LONG:
                self.recorded.remove(oldest)

    def _refuse(self, seen: _Seen, reason: BaseException, builds_structure: bool) -> None:
        reason = _first(reason)
        text = str(reason).strip().splitlines()[0]
        if BROKEN in text and self._broken < TRIES - 1:
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


def _first(error: BaseException) -> BaseException:
    """What broke a capture, if that is known: its end is an error of its own."""
    while BROKEN in str(error) and error.__context__ is not None:
        error = error.__context__
    return error


def _is_the_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is int and one == other)


def _storage(value: Any) -> int:
    return _compat.storage_address(value) if isinstance(value, Tensor) else 0


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1
