"""Facts about devices: each kind has them, and no code tests for a kind by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gnncompile.device import device_of
from tests.harness import kernels, tune

ROOT = Path(__file__).resolve().parents[2]
LEFT = {
    "device.py": "makes the facts",
    "testing.py": "makes random graphs",
    "codegen/cpp/kernel.py": "checks its arguments",
    "cudagraphs/backward_thread.py": "asks in every call, where torch's own flag is faster",
    "_compat/substitution.py": "lists attributes of tensors",
    "sampling/cpu.py": "advises the operating system about memory of the host",
}
"""The files that may ask for the kind of a device, and why."""


def test_no_other_code_asks_for_a_kind():
    asks = re.compile(r"\b(?:device|place)\.type (?:[!=]=|in\b)|\bis_cuda\b|\bis_cpu\b")
    found = {
        file.relative_to(ROOT / "gnncompile").as_posix()
        for file in (ROOT / "gnncompile").rglob("*.py")
        if asks.search(file.read_text(encoding="utf-8"))
    }
    assert found - set(LEFT) == set()


def test_a_host_and_a_gpu():
    host, gpu = device_of(torch.device("cpu")), device_of("cuda")
    assert (host.has_streams, host.can_be_recorded, host.host_waits) == (False, False, False)
    assert (gpu.has_streams, gpu.can_be_recorded, gpu.host_waits) == (True, True, True)
    assert host.name == "cpu" and not host.is_capturing


def test_a_device_is_one_object():
    assert device_of(torch.device("cpu")) is device_of(torch.zeros(1).device)
    assert device_of(torch.device("cuda", 0)) is not device_of(torch.device("cuda", 1))


@pytest.mark.parametrize("kind", ["meta", "cuda"])
def test_other_memory_than_the_hosts(kind: str):
    assert device_of(kind).host_waits and not device_of(kind).computes_in_vectors


@pytest.mark.parametrize("interprets", ["", "1"])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_beside_a_gpu_triton_is_for_the_gpu_alone(has_gpu: bool, interprets: str, monkeypatch: pytest.MonkeyPatch):
    """Its kernels would read a CPU's memory there: an illegal access, after which the process can't use the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    assert device_of("cpu").generator == ("cpp" if has_gpu and not interprets else "triton")
    assert device_of("cuda").generator == "triton"


def test_the_environment_is_asked_at_each_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GNNCOMPILE_KERNELS", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    host, gpu = device_of("cpu"), device_of("cuda")
    assert (host.generator, gpu.generator) == ("cpp", "triton")
    for which in ("triton", "cpp", "reference"):
        with kernels(which):
            assert host.generator == gpu.generator == which and host.runs_triton == (which == "triton")
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "nonsense")
    assert (host.generator, gpu.generator) == ("cpp", "triton")


def test_products_are_tuned_for_some_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GNNCOMPILE_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert device_of("cuda").has_tuned_products and not device_of("cpu").has_tuned_products
    tune(monkeypatch, capability=(1, 0))
    assert not device_of("cuda").has_tuned_products
