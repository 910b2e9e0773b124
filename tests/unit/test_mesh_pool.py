"""What one process of a mesh records and replays, given the answers of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gnncompile import _compat
from gnncompile._compat import process_groups
from gnncompile.cudagraphs import cuda_graph, mesh_pool
from gnncompile.cudagraphs.mesh_pool import BROKEN, FAILED, READY, RECORDED, MeshCudaGraphPool
from gnncompile.cudagraphs.pool import TRIES, WARM
from gnncompile.cudagraphs.recorder import CudaGraphSettings
from gnncompile.cudagraphs.static_inputs import StaticInputs
from gnncompile.exc import PartitionError
from gnncompile.layout.halo import joined_rows, make_plan, with_room
from tests.tape import Tapes, tapes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs a torch with torch.distributed")


class Others:
    """The other process: it answers as this one does, unless told otherwise."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {}
        self.asked: list[tuple[str, list[str]]] = []

    def __call__(self, group: str, what: str, mine: Sequence[str]) -> list[list[str]]:
        self.asked.append((what, list(mine)))
        return [list(mine), self.answers.get(what, list(mine))]


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    made = Others()
    monkeypatch.setattr(mesh_pool, "collect", made)
    monkeypatch.setattr(mesh_pool, "_end_before_groups", lambda: None)
    with tapes():
        yield made


def pool(most: int = 4) -> MeshCudaGraphPool:
    """A pool of a graph with features, the rows that a plan sends, and a parameter."""

    def run(x: Tensor, send: Tensor, weight: Tensor) -> tuple[Tensor]:
        return ((x * weight).index_select(0, send),)

    return MeshCudaGraphPool(run, most, torch.device("cpu"), (), CudaGraphSettings(False), "a group", (2,))


def send(partition: str = "one") -> Tensor:
    return make_plan(torch.tensor([1, 0]), [2], [0], 3, partition, 0, frozenset((3,))).send


WEIGHT = torch.tensor(2.0)


def test_processes_are_asked_before_and_after_a_capture_only(others: Others) -> None:
    pairs, rows = pool(), send()
    for step in range(WARM + 4):
        x = torch.randn(3)  # at another address in each step
        (found,) = pairs([x, rows, WEIGHT])
        torch.testing.assert_close(found, (2 * x)[[1, 0]])
        assert len(pairs.recorded) == (step >= WARM)
    assert others.asked == [("a graph to record", [READY, "one"]), ("the end of a capture", [RECORDED, ""])]
    assert pairs.begin([x, rows, WEIGHT]) is None


def test_parts_of_the_same_sizes_are_told_apart() -> None:
    pairs, parts = pool(), [send("one"), send("two")]
    for _ in range(WARM + 1):
        for rows in parts:
            pairs([torch.ones(3), rows, WEIGHT])
    assert len(pairs.recorded) == 2


def test_no_process_records_if_one_is_not_ready(others: Others) -> None:
    others.answers["a graph to record"] = ["busy", "one"]
    pairs, rows = pool(), send()
    for _ in range(2 * WARM + 2):
        pairs([torch.ones(3), rows, WEIGHT])
    assert not pairs.recorded and Tapes.captures == 0
    assert [what for what, _ in others.asked] == ["a graph to record"] * 2


def test_no_process_replays_if_one_could_not_record(others: Others) -> None:
    others.answers["the end of a capture"] = [FAILED, "no memory"]
    pairs, rows = pool(), send()
    for _ in range(2 * WARM + 2):
        pairs([torch.ones(3), rows, WEIGHT])
    assert not pairs.recorded and pairs.reason == "rank 1 could not record it: no memory"
    assert len(others.asked) == 2


def test_a_capture_that_was_broken_in_one_process_is_tried_again(others: Others) -> None:
    others.answers["the end of a capture"] = [BROKEN, "broken"]
    pairs, rows = pool(), send()
    for _ in range(WARM + 1):
        pairs([torch.ones(3), rows, WEIGHT])
    assert not pairs.recorded and pairs.reason is None
    del others.answers["the end of a capture"]
    for _ in range(WARM + 1):
        pairs([torch.ones(3), rows, WEIGHT])
    assert len(pairs.recorded) == 1


def test_a_capture_that_is_broken_each_time_is_given_up(others: Others) -> None:
    others.answers["the end of a capture"] = [BROKEN, "broken"]
    pairs, rows = pool(), send()
    for _ in range((TRIES + 1) * (WARM + 1)):
        pairs([torch.ones(3), rows, WEIGHT])
    assert Tapes.captures == TRIES and pairs.reason == "rank 1 could not record it: broken"


def test_other_partitions_are_an_error(others: Others) -> None:
    others.answers["a graph to record"] = [READY, "another"]
    pairs, rows = pool(), send()
    for _ in range(WARM):
        pairs([torch.ones(3), rows, WEIGHT])
    with pytest.raises(PartitionError, match=r"rank 0: one; rank 1: another"):
        pairs([torch.ones(3), rows, WEIGHT])


def test_an_error_of_another_kind_is_told_to_the_others(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(mesh_pool, "tell_failure", lambda group, error: told.append((group, str(error))))
    pairs, rows = pool(), send()
    for _ in range(WARM):
        pairs([torch.ones(3), rows, WEIGHT])

    def fails(device: torch.device) -> Any:
        def record(work: Any) -> Any:
            raise ValueError("another kind")

        return record

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="another kind"):
        patch.setattr(cuda_graph, "recorder", fails)  # undone before the tapes are
        pairs([torch.ones(3), rows, WEIGHT])
    assert told == [("a group", "another kind")]


def test_a_forward_before_the_last_backward_asks_the_others(others: Others) -> None:
    def run(x: Tensor, send: Tensor, weight: Tensor) -> tuple[Tensor]:
        return ((x * weight).index_select(0, send),)

    weight, rows = torch.nn.Parameter(torch.tensor(2.0)), send()
    graph = MeshCudaGraphPool(run, 4, torch.device("cpu"), (), CudaGraphSettings(False), "a group", (2,))
    for _ in range(WARM + 2):
        graph([torch.ones(3), rows, weight])[0].sum().backward()
    assert len(graph.recorded) == 1 and len(others.asked) == 2
    first = graph([torch.ones(3), rows, weight])[0]
    assert len(others.asked) == 2
    second = graph([torch.ones(3), rows, weight])[0]  # runs without the recording, which the first result needs
    assert others.asked[2:] == [("a forward before the backward of the last one", ["busy"])]
    weight.grad = None
    first.sum().backward()
    second.sum().backward()
    assert weight.grad is not None and weight.grad.item() == 4
    del first, second
    graph([torch.ones(3), rows, weight])[0].sum().backward()
    others.answers["a forward before the backward of the last one"] = ["busy"]
    graph([torch.ones(3), rows, weight])  # no backward follows
    graph([torch.ones(3), rows, weight])
    assert [mine for _, mine in others.asked[3:]] == [[READY]]  # free here, but not in the other process


def test_copies_of_features_have_room_for_halo_rows() -> None:
    rows, halo = with_room(torch.randn(3, 4), 2), torch.empty(2, 0, dtype=torch.int8)
    copies = StaticInputs([rows], [0])
    held = copies.tensors[0]
    assert held.data_ptr() != rows.data_ptr() and torch.equal(held, rows)
    assert joined_rows(held, halo).data_ptr() == held.data_ptr()


def test_a_full_pool_asks_whether_the_oldest_recording_is_free(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_pool, "LONG", 1)
    pairs, parts = pool(most=1), [send("one"), send("two")]
    for rows in parts:
        for _ in range(WARM + 1):
            pairs([torch.ones(3), rows, WEIGHT])
    assert len(pairs.recorded) == 1 and pairs.recorded[0][1].fits([torch.ones(3), parts[1], WEIGHT])
    assert len(others.asked) == 4


def test_the_end_of_a_group_ends_its_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, rows, ended = pool(), send(), []
    monkeypatch.setattr(Tapes, "reset", lambda self: ended.append(self))
    for _ in range(WARM + 1):
        pairs([torch.ones(3), rows, WEIGHT])
    pairs.end()
    assert len(ended) == 1 and not pairs.recorded
    (found,) = pairs([torch.ones(3), rows, WEIGHT])
    assert found.tolist() == [2, 2]


def test_the_reason_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_pool, "group_of", lambda name: name)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    monkeypatch.setattr(mesh_pool, "_reasons", {})
    monkeypatch.setattr(mesh_pool, "collect", lambda group, what, mine: [mine, mine])
    for config, can in (("cpu:gloo,cuda:gloo", False), ("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        assert _compat.is_nccl("a group") is can  # type: ignore[arg-type]
        assert (mesh_pool.why_not("a group") is None) is can


def test_the_reason_where_nccl_registers_buffers(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_pool, "group_of", lambda name: name)
    monkeypatch.setattr(_compat, "is_nccl", lambda group: True)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    monkeypatch.setattr(mesh_pool, "_reasons", {})
    assert mesh_pool.why_not("a group") == mesh_pool.REGISTERS
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert mesh_pool.why_not("another group") is None
    others.answers["the first graph to record"] = [mesh_pool.REGISTERS]
    assert mesh_pool.why_not("a third group") == mesh_pool.REGISTERS  # as the other process, in all its calls
    others.answers.clear()
    assert mesh_pool.why_not("a third group") == mesh_pool.REGISTERS
    assert len(others.asked) == 3


def test_inputs_in_one_piece_of_memory_are_replayed_at_any_offset() -> None:
    """Whether a few bytes stand together differs between parts."""

    def run(x: Tensor, y: Tensor, send: Tensor) -> tuple[Tensor]:
        return ((x * y).index_select(0, send),)

    both = MeshCudaGraphPool(run, 4, torch.device("cpu"), (), CudaGraphSettings(False), "a group", ())
    series, rows = torch.randn(20, 3), send()
    for step in range(WARM + 4):
        x, y = series[step], series[2 * step + 1]
        torch.testing.assert_close(both([x, y, rows])[0], (x * y)[[1, 0]])
    assert len(both.recorded) == 1 and both.recorded[0][1].last_call == WARM + 4


def test_parameters_of_a_recording_stay_alive() -> None:
    """Otherwise other parameters might take their place in one process alone, which would replay."""
    pairs, rows, weight = pool(), send(), torch.tensor(2.0)
    for _ in range(WARM + 1):
        pairs([torch.ones(3), rows, weight])
    memory = _compat.StorageWeakRef(weight.untyped_storage())
    del weight
    assert len(pairs.recorded) == 1 and not memory.expired()


def test_a_failed_capture_frees_the_recordings(others: Others) -> None:
    pairs, parts = pool(), [send("one"), send("two")]
    for _ in range(WARM + 1):
        pairs([torch.ones(3), parts[0], WEIGHT])
    others.answers["the end of a capture"] = [FAILED, "no memory"]
    for _ in range(WARM + 1):
        pairs([torch.ones(3), parts[1], WEIGHT])
    assert not pairs.recorded and pairs.reason == "rank 1 could not record it: no memory"


def test_destroying_a_group_calls_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(dist.distributed_c10d, "destroy_process_group", lambda group=None: calls.append(("end", group)))
    monkeypatch.setattr(dist, "destroy_process_group", dist.distributed_c10d.destroy_process_group)
    _compat.patch_destroy_process_group(lambda group: calls.append(("before", group)))
    dist.destroy_process_group("a group")  # type: ignore[arg-type]
    dist.distributed_c10d.destroy_process_group()
    assert calls == [("before", "a group"), ("end", "a group"), ("before", None), ("end", None)]


def test_graphs_of_a_recorder_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        ended = 0

        def reset(self) -> None:
            Graph.ended += 1

    recorder = object.__new__(cuda_graph.CudaGraphs)
    graph = Graph()
    recorder._device, recorder._graphs = torch.device("cuda", 0), {graph}  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    recorder.reset()
    assert Graph.ended == 1


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("setting", [None, "0", "1", "True"])
@pytest.mark.parametrize("asked", [True, False])
def test_exchanges_of_usual_priority_are_told(
    nccl: bool, setting: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(options=SimpleNamespace(is_high_priority_stream=asked))
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(process_groups, "is_nccl", lambda group: nccl)
    if setting is None:
        monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", setting)
    assert process_groups.has_usual_priority(group) == (nccl and setting in (None, "0") and not asked)  # type: ignore[arg-type]
