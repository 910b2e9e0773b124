"""Chooses what is recorded of a graph that runs over one part, in the same way in all processes of the mesh.

A recording over a part holds collectives of NCCL. NCCL wants an operation to be captured in all processes or in none,
and a CUDA graph to be launched by all of them, as often and in the same order. No process looks at the others in a
step, so each decision is one of two kinds:

- It follows from what is equal in all processes that call the model alike: how often a part, a mode and an optimizer
  were met, and how often each recording was replayed. Addresses and sizes of a part never decide anything alone. All
  inputs are copied to the recording, except for parameters, buffers and what structure is built of: the index tensors
  of the graph, and features whose halo rows are kept with it. A recording keeps the memory of these alive.
- Else the processes compare their answers on the host, through the store of their group: before a capture, after it,
  and before a forward that comes while the backward of another is still to come. The event that makes them ask is of
  the first kind, so all of them ask.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gnncompile import _compat
from gnncompile.cudagraphs import cuda_graph
from gnncompile.cudagraphs.pool import LONG, TRIES, Begun, CudaGraphPool, Seen, first_error
from gnncompile.cudagraphs.recorder import CudaGraphRun, CudaGraphSettings, Lease
from gnncompile.exc import PartitionError, UnsupportedRegion
from gnncompile.layout.agreement import collect, tell_failure
from gnncompile.layout.halo import group_of, partition_of
from gnncompile.layout.identity_cache import identify

logger = logging.getLogger(__name__)

EXCHANGES = "it exchanges rows with other processes, and its process group does not use NCCL"
"""The reason that a graph over one part is not recorded as a CUDA graph."""

REGISTERS = (
    "NCCL would register the buffers of CUDA graphs with the other processes, and wait for ever if one of them can't "
    "capture. Set NCCL_GRAPH_REGISTER=0 in the environment of all processes"
)
"""The reason that a graph over one part is not recorded though its process group uses NCCL."""

READY, RECORDED, BROKEN, FAILED = "ready", "recorded", "broken", "failed"
"""Answers of a process: it can record, it has recorded, its capture was broken from outside, it can't record."""


_reasons: dict[str, str | None] = {}
"""By the name of a group: why nothing is recorded over it, as its processes have found together."""


def why_not(group: str) -> str | None:
    """Returns why graphs that exchange rows over a group can't be recorded, or None if they can.

    All processes get the same answer, which they compare once for each group.
    """
    if not _compat.is_nccl(group_of(group)):
        return EXCHANGES
    if group not in _reasons:
        mine = "" if os.environ.get("NCCL_GRAPH_REGISTER") == "0" else REGISTERS
        found = [reason for (reason,) in collect(group, "the first graph to record", [mine])]
        _reasons[group] = next(filter(None, found), None)
    return _reasons[group]


class MeshCudaGraphPool(CudaGraphPool):
    """Runs a graph over one part, by replay if possible. All processes of the mesh replay together.

    Args:
        run: The graph, called with its inputs.
        most: The largest number of recordings.
        device: The device of the graph.
        structural: Indices of the inputs from which graph structure is built, the same in all processes. A recording
            is for these very tensors, unchanged.
        settings: How recordings are replayed.
        group: The name of the process group.
        kept: Indices of the parameters and buffers among the inputs. A recording reads and writes them in place.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        most: int,
        device: Any,
        structural: Iterable[int],
        settings: CudaGraphSettings,
        group: str,
        kept: Iterable[int],
    ) -> None:
        super().__init__(run, most, device, structural, settings)
        self.group, self.kept = group, frozenset(kept)
        self._recorders: weakref.WeakKeyDictionary[CudaGraphRun, cuda_graph.Recorder] = weakref.WeakKeyDictionary()
        _end_before_groups()
        _pools.add(self)

    def begin(self, args: Sequence[Any]) -> Begun | None:
        """Returns None: a wrong guess of one process would be a collective that the others do not run."""
        return None

    def end(self) -> None:
        """Frees all recordings. NCCL can't end a communicator that CUDA graphs refer to."""
        self.reason = "its process group was destroyed"
        for recorder in self._recorders.values():
            recorder.reset()
        self.recorded.clear()

    def _lease(self, recording: CudaGraphRun) -> Lease | None:
        if recording.awaits_backward:
            free = self._ask("a forward before the backward of the last one", READY if recording.free else "busy")
            if any(answer != READY for answer, *_ in free):
                return None
            recording.awaits_backward = False
        lease = recording.lease()
        if lease is None:
            raise PartitionError(
                "a recorded forward over a part was called while another thread runs it. Call the model in one thread."
            )
        return lease

    def _replay(self, recording: CudaGraphRun, args: Sequence[Any], lease: Lease, begun: bool = False) -> Any:
        made = super()._replay(recording, args, lease, begun)
        node = next((m.grad_fn for m in made if isinstance(m, Tensor) and m.grad_fn is not None), None)
        if node is not None:
            recording.awaits_backward = True
            # The end of a backward is the same event in all processes; the end of a lease is up to Python's garbage.
            node.register_hook(lambda *_: setattr(recording, "awaits_backward", _compat.keeps_graph()))
        return made

    def _look(self, args: Sequence[Any], context: Any, memory: int | None) -> Seen:
        fixed = [args[k] for k in self._fixed(args)]
        state = [args[k] for k in self._state(args)]
        graph = identify(fixed)
        sizes = tuple([(a.shape, a.stride()) if isinstance(a, Tensor) else a for a in args])
        places = tuple([(_compat.storage_address(t), t.storage_offset()) for t in state])
        seen = self._seen_as((context, sizes, graph, places), context)
        seen.refused |= graph is None  # a change of a tensor without a version counter would not be noticed
        if not seen.owners:
            seen.owners = [
                _compat.StorageWeakRef(t.untyped_storage()) for t in (*fixed, *state) if isinstance(t, Tensor)
            ]
        return seen

    def _fixed(self, args: Sequence[Any]) -> list[int]:
        """Returns the indices of the tensors that name the graph: exchanges and structure are known by them."""
        tensors = [k for k, a in enumerate(args) if isinstance(a, Tensor)]
        return [k for k in tensors if k in self.structural or partition_of(args[k]) is not None]

    def _state(self, args: Sequence[Any]) -> list[int]:
        fixed = set(self._fixed(args))
        tensors = [k for k, a in enumerate(args) if isinstance(a, Tensor) and k not in fixed]
        return [k for k in tensors if k in self.kept or isinstance(args[k], nn.Parameter)]

    def _record(self, seen: Seen, args: Sequence[Any]) -> CudaGraphRun | None:
        seen.runs = 0  # in any case, the next attempt is some runs away
        oldest = min(self.recorded, key=lambda known: known[1].last_call) if len(self.recorded) >= self.most else None
        if self.most < 1 or (oldest is not None and self._calls - oldest[1].last_call <= LONG):
            return None
        if not self._all_are_ready(args, oldest is None or oldest[1].free):
            return None
        if oldest is not None:
            self.recorded.remove(oldest)
        recording, error = self._captured(seen, args)
        if not self._all_have_recorded(seen, error):
            return None
        assert recording is not None
        self.recorded.append((seen, recording))
        return recording

    def _captured(self, seen: Seen, args: Sequence[Any]) -> tuple[CudaGraphRun | None, BaseException | None]:
        fixed, state = frozenset(self._fixed(args)), self._state(args)
        copied = frozenset(k for k, a in enumerate(args) if isinstance(a, Tensor)) - fixed - frozenset(state)
        if not copied.isdisjoint(seen.mutated):
            return None, UnsupportedRegion("it writes to an input, and inputs of a part are copied to each recording")
        try:
            record, mutated = cuda_graph.recorder(self.device), frozenset(seen.mutated)
            recording = CudaGraphRun(self.run, args, fixed, copied, mutated, record, self.settings, over_parts=True)
        except (UnsupportedRegion, RuntimeError) as error:
            return None, error
        except BaseException as error:
            tell_failure(self.group, error)
            raise
        self._recorders[recording] = record
        return recording, None

    def _all_are_ready(self, args: Sequence[Any], is_ready: bool) -> bool:
        """Whether all processes can record now.

        Raises:
            PartitionError: The processes have parts of different partitions.
        """
        names = sorted({name for a in args if isinstance(a, Tensor) and (name := partition_of(a)) is not None})
        answers = self._ask("a graph to record", READY if is_ready else "busy", *names)
        if any(answer[1:] != answers[0][1:] for answer in answers):
            told = "; ".join(f"rank {rank}: {', '.join(held)}" for rank, (_, *held) in enumerate(answers))
            raise PartitionError(
                f"the processes are about to record steps on parts of different partitions ({told}). All processes "
                "must call the model with parts of the same partition."
            )
        return all(answer[0] == READY for answer in answers)

    def _all_have_recorded(self, seen: Seen, error: BaseException | None) -> bool:
        """Whether all processes have recorded. If one could not, the others can't replay."""
        text, answer = "", RECORDED
        if error is not None:
            first, text = first_error(error)
            answer = BROKEN if _compat.is_broken_capture(first) else FAILED
        answers = self._ask("the end of a capture", answer, text)
        wrong = [rank for rank, (found, _) in enumerate(answers) if found != RECORDED]
        if not wrong:
            return True
        told = "; ".join(f"rank {rank} could not record it: {answers[rank][1]}" for rank in wrong)
        if self._broken < TRIES - 1 and all(answers[rank][0] == BROKEN for rank in wrong):
            self._broken += 1
            logger.info("a capture is tried again: %s", told)
            return False
        seen.refused, self.reason = True, told
        self.recorded.clear()  # none is replayed any more
        logger.warning("a graph is not recorded: %s", self.reason)
        return False

    def _ask(self, what: str, *mine: str) -> list[list[str]]:
        return collect(self.group, what, mine)


_pools: weakref.WeakSet[MeshCudaGraphPool] = weakref.WeakSet()
"""The pools that are alive."""


@lru_cache(maxsize=1)
def _end_before_groups() -> None:
    """Makes recordings end before their process group does. NCCL would wait for them for ever."""
    _compat.patch_destroy_process_group(_end)


def _end(group: dist.ProcessGroup | None) -> None:
    ending = [pool for pool in _pools if group is None or group_of(pool.group) is group]
    with ExitStack() as all_end:  # also where one of them raises an error
        for pool in ending:
            _reasons.pop(pool.group, None)
            all_end.callback(pool.end)
