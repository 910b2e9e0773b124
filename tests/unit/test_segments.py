"""CUDA graphs are captured with segments of memory that grow, and the allocator's settings are as before afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from gnncompile import _compat
from gnncompile._compat import segments

GROWS, USUAL = "expandable_segments:True", "expandable_segments:False"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that the allocator was given, in order. The GPU can grow memory."""
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    monkeypatch.setattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: given[-1] if given else "", raising=False
    )
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(segments, "_can_grow", lambda device: True)
    for name in segments._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return given


def test_segments_grow_while_a_graph_is_captured(settings: list[str]) -> None:
    for _ in range(2):
        with _compat.growing_segments(0):
            assert settings.pop() == GROWS
        assert settings.pop() == USUAL


def test_settings_are_as_before_after_an_error(settings: list[str]) -> None:
    with pytest.raises(ValueError), _compat.growing_segments(0):
        raise ValueError
    assert settings == [GROWS, USUAL]


def test_captures_of_several_threads(settings: list[str]) -> None:
    barrier = Barrier(3)

    def capture(_: int) -> list[str]:
        with _compat.growing_segments(0):
            barrier.wait()  # all threads capture now
            seen = list(settings)
            barrier.wait()
        return seen

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(capture, range(3))) == [[GROWS]] * 3
    assert settings == [GROWS, USUAL]


@pytest.mark.parametrize(
    "own", ["environment", "setting", "its own growing segments", "backend", "processes", "driver"]
)
def test_settings_of_the_user_stay(own: str, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "environment": lambda: monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"),
        "setting": lambda: settings.append("max_split_size_mb:64"),
        "its own growing segments": lambda: settings.append(GROWS),
        "backend": lambda: monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync"),
        "processes": lambda: monkeypatch.setattr(segments, "_has_processes", lambda: True),
        "driver": lambda: monkeypatch.setattr(segments, "_can_grow", lambda device: False),
    }
    changes[own]()
    before = list(settings)
    with _compat.growing_segments(0):
        assert settings == before
    assert settings == before


def test_a_machine_without_a_driver() -> None:
    assert torch.cuda.is_available() or not segments._can_grow(0)


@pytest.mark.gpu
def test_a_gpu_has_memory_that_grows() -> None:
    """A recorded graph has its memory in such segments."""
    from gnncompile.cudagraphs.cuda_graph import CudaGraphs

    if not segments._can_grow(0) or segments._has_own_settings():
        pytest.skip("this GPU, or its settings, leave segments as they are")
    device = torch.device("cuda", 0)
    x = torch.ones(5_000_000, device=device)
    replay, made = CudaGraphs(device)(lambda: x * 2)
    replay()
    assert float(made.sum()) == 10_000_000
    held = [one for one in torch.cuda.memory_snapshot() if one["segment_pool_id"] != (0, 0) and one["is_expandable"]]
    assert sum(one["total_size"] for one in held) >= made.nbytes
    after = torch.empty(30_000_000, device=device)
    owner = [
        s for s in torch.cuda.memory_snapshot() if s["address"] <= after.data_ptr() < s["address"] + s["total_size"]
    ]
    assert len(owner) == 1 and not owner[0]["is_expandable"]
