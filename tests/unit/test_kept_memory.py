"""Memory that compiled models keep: no two buffers share it, and it stays small."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import gnncompile
from gnncompile import _compat
from gnncompile.runtime import kept_memory
from gnncompile.runtime.kept_memory import empty_strided, kept_bytes

LEAST = _compat.LEAST_KEPT


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    gnncompile.release_memory()
    yield
    gnncompile.release_memory()


def buffer(nbytes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return empty_strided((nbytes // dtype.itemsize,), (1,), dtype)


def test_the_next_buffer_lives_in_the_memory_of_a_freed_one() -> None:
    one = buffer(2 * LEAST)
    address = one.data_ptr()
    del one
    assert buffer(LEAST).data_ptr() == address
    halves = empty_strided((4, LEAST // 4), (1, 4), torch.bfloat16)  # of another dtype, with other strides
    assert halves.data_ptr() == address and halves.stride() == (1, 4) and halves.dtype is torch.bfloat16
    assert kept_bytes() == 2 * LEAST


@pytest.mark.parametrize("kind", ["tensor", "view", "alias", "numpy", "saved"])
def test_memory_that_a_tensor_shares_is_no_other_buffers(kind: str) -> None:
    one = buffer(LEAST)
    address, held = one.data_ptr(), None
    if kind == "tensor":
        held = one
    elif kind == "view":
        held = one[5:7]
    elif kind == "alias":
        held = _compat.buffer_in(one, (3,), (1,), 0)
    elif kind == "numpy":
        held = one.numpy()
    else:
        held = (torch.ones(1, requires_grad=True) * one).sum()  # autograd saved it, no Python object holds it
    del one
    assert buffer(LEAST).data_ptr() != address
    assert kept_bytes() == 2 * LEAST
    del held
    both = [buffer(LEAST) for _ in range(2)]
    assert address in [one.data_ptr() for one in both] and kept_bytes() == 2 * LEAST


def test_a_buffer_gets_the_smallest_free_memory_in_which_it_fits() -> None:
    buffers = {size: buffer(size * LEAST) for size in (4, 1, 3, 2)}
    addresses = {size: one.data_ptr() for size, one in buffers.items()}
    buffers.clear()
    held = [buffer(2 * LEAST - 8), buffer(2 * LEAST), buffer(LEAST), buffer(3 * LEAST)]
    assert [one.data_ptr() for one in held] == [addresses[size] for size in (2, 3, 1, 4)]
    assert kept_bytes() == 10 * LEAST


def test_a_buffer_of_a_call_for_inference_can_be_saved_for_a_backward_later() -> None:
    with torch.inference_mode():
        one = buffer(LEAST)
        address = one.data_ptr()
        del one
    held = buffer(LEAST).fill_(2.0)
    assert held.data_ptr() == address and not held.is_inference()
    x = torch.ones(held.shape, requires_grad=True)
    (x * held).sum().backward()
    assert x.grad is not None and bool((x.grad == 2).all())


def test_a_buffer_is_no_view_and_its_writes_are_its_own() -> None:
    one = buffer(LEAST)
    one.add_(1)
    version = one._version
    del one
    other = buffer(LEAST)
    assert version == 1 and other._version == 0 and other._base is None and not other.requires_grad


def test_memory_of_sizes_that_do_not_come_again_is_given_back() -> None:
    drawn = random.Random(0)
    for most in (8, 2, 8):
        for _ in range(2000):
            held = [buffer(most * LEAST - 4 * drawn.randrange(LEAST // 2)) for _ in range(3)]
            held.clear()
    assert kept_bytes() <= 3 * 8 * LEAST
    for _ in range(1000):
        buffer(20 * LEAST)
        buffer(40 * LEAST - 4 * drawn.randrange(LEAST))
    assert kept_bytes() <= (20 + 40) * LEAST
    for _ in range(2000):
        buffer(LEAST)
    assert kept_bytes() == LEAST  # a buffer that is much smaller than a block does not keep it in use


def test_the_memory_is_freed_but_not_that_of_buffers() -> None:
    held, other = buffer(LEAST).fill_(3.0), buffer(LEAST)
    del other
    assert kept_bytes() == 2 * LEAST
    gnncompile.release_memory()
    assert kept_bytes() == 0
    others = [buffer(LEAST).fill_(4.0) for _ in range(4)]
    assert bool((held == 3).all()) and len({held.data_ptr(), *(one.data_ptr() for one in others)}) == 5


def test_no_memory_is_left_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch raises a RuntimeError where the system has no memory. What is free is given back before another try."""
    buffer(LEAST // 2)
    made, ordinary = [], kept_memory._Block

    def block(size: int) -> kept_memory._Block:
        made.append(len(kept_memory._blocks._free))
        if len(made) == 1:
            raise RuntimeError("not enough memory")
        return ordinary(size)

    monkeypatch.setattr(kept_memory, "_Block", block)
    assert buffer(2 * LEAST).numel() == LEAST // 2
    assert made == [1, 0] and kept_bytes() == 2 * LEAST


def test_threads_never_share_a_buffer() -> None:
    def work(number: int) -> bool:
        drawn, right = random.Random(number), True
        for step in range(300):
            held = [buffer(LEAST * drawn.randint(1, 3)) for _ in range(3)]
            for one in held:
                one[:: LEAST // 16] = number * 1000 + step
            right &= all(bool((one[:: LEAST // 16] == number * 1000 + step).all()) for one in held)
            if number == 0 and step % 50 == 0:
                gnncompile.release_memory()
        return right

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def test_memory_that_was_resized_is_no_buffers() -> None:
    """A saved-tensor hook may free the memory of a tensor that it copied."""
    one = buffer(LEAST)
    one.untyped_storage().resize_(0)
    del one
    assert bool((buffer(LEAST).fill_(7.0) == 7).all())


def test_the_lock_is_not_waited_for_in_its_own_thread() -> None:
    """A finalizer may call a compiled model wherever Python collects garbage, and a signal handler may free memory."""
    with kept_memory._blocks._lock:
        assert buffer(LEAST).numel() == LEAST // 4
        gnncompile.release_memory()
    assert kept_bytes() == 0


def test_a_call_within_a_call_takes_no_memory_twice() -> None:
    """Python may collect garbage, and run a compiled model, while blocks are looked at."""
    for _ in range(4):
        buffer(LEAST)
    ordinary, calls, inner = _compat.users_at, [0], []

    def users_at(address: int) -> int:
        found = ordinary(address)
        calls[0] += 1
        if calls[0] == 1:
            inner.append(buffer(LEAST))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compat, "users_at", users_at)
        outer = [buffer(LEAST) for _ in range(4)]
    held = [*inner, *outer]
    assert len(inner) == 1 and len({one.data_ptr() for one in held}) == len(held)


def test_hundreds_of_blocks_in_use_do_not_slow_a_buffer_down() -> None:
    """In steps of a deep model, the buffers of the forward wait for the backward. Few blocks are looked at."""
    looked, ordinary = [0], _compat.users_at

    def users_at(address: int) -> int:
        looked[0] += 1
        return ordinary(address)

    with pytest.MonkeyPatch.context() as patch:
        for _ in range(3):
            looked[0] = 0
            patch.setattr(_compat, "users_at", users_at)
            held = []
            for _ in range(400):
                held.append(buffer(LEAST))
                buffer(LEAST)
            while held:
                buffer(LEAST)
                held.pop()
    assert looked[0] < 10 * 1200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_lock_of_the_parent() -> None:
    held = buffer(LEAST).fill_(5.0)
    with kept_memory._blocks._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            buffer(LEAST)[0] = 1.0
            os._exit(0 if held[0].item() == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
