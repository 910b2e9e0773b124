"""Gathering rows of features: every dtype and shape against ``torch.index_select``, and padding, caches and errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.sampling.gather import Cache, counters, gather, gathered

pytestmark = triton_regions.INTERPRETED
device_name = triton_regions.device

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
)  # fmt: skip


def features(rows: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random bytes, so that bits count: NaN, infinities and signs of zero included. Bools are 0 or 1."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randint(256, (torch.empty(rows, *shape, dtype=dtype).nbytes,), generator=random, dtype=torch.uint8)
    made = made % 2 if dtype == torch.bool else made
    return made.view(dtype).view(rows, *shape)


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().flatten().view(torch.uint8)


def same(found: Tensor, x: Tensor, node: Tensor) -> None:
    """Compares with index_select of bytes."""
    assert found.dtype == x.dtype and found.shape == (len(node), *x.shape[1:])
    rows = bits(x).view(x.size(0), -1) if x.numel() else torch.empty(x.size(0), 0, dtype=torch.uint8)
    assert torch.equal(bits(found), rows[node.cpu().long()].flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, device_name: str):
    x, node = features(20, 7, dtype=dtype), torch.tensor([19, 0, 3, 3, 7])
    same(gather(x.to(device_name), node.to(device_name)), x, node)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (100,), (128,), (2, 3, 5), (1433,), (3000,), (0,)], ids=str)
def test_shapes(shape: tuple[int, ...], index: torch.dtype, device_name: str):
    """Rows of 4 bytes and of several programs, of 16 bytes each or not, and without an element."""
    x, node = features(300, *shape), torch.randint(300, (150,), generator=torch.Generator().manual_seed(1)).to(index)
    same(gather(x.to(device_name), node.to(device_name)), x, node)


def test_awkward_rows(device_name: str):
    none, one = torch.empty(0, dtype=torch.int64, device=device_name), features(1, 5).to(device_name)
    same(gather(one, none), one, none)
    same(gather(one[:0], none), one[:0], none)
    same(gather(one, torch.zeros(9, dtype=torch.int64, device=device_name)), one, torch.zeros(9, dtype=torch.int64))
    x, node = features(50, 6, dtype=torch.int8).to(device_name), torch.arange(40, device=device_name)
    same(gather(x[1:], node), x[1:], node)  # not aligned
    same(gather(x, node[::3]), x, node[::3])


@pytest.mark.parametrize("shape", [(3,), (16,)], ids=str)
@pytest.mark.parametrize("valid", [0, 1, 7, 2000, 2100])
def test_padded_rows_repeat_the_first_rows(valid: int, shape: tuple[int, ...], device_name: str):
    """Rows from `end` on are not read: their entries of `node` are only those of the first rows by contract."""
    x = features(2200, *shape).to(device_name)
    node = torch.randperm(2200, generator=torch.Generator().manual_seed(2))[:2100]
    node[valid:] = node[torch.arange(2100 - valid) % max(min(valid, 1024), 1)] if valid else 0
    end, out = torch.tensor([valid], device=device_name), features(2100, *shape, seed=9).to(device_name)
    reads = torch.zeros(2200, dtype=torch.int32, device=device_name)
    found = gathered(x, node.to(device_name), end=end, out=out, reads=reads)
    assert found is out
    same(found, x, node)
    assert torch.equal(reads.cpu(), torch.bincount(node[:valid], minlength=2200).int())


@pytest.mark.parametrize("shape", [(5,), (8,), (1500,)], ids=str)
@pytest.mark.parametrize("slots", [0, 30, 60])
def test_cache(slots: int, shape: tuple[int, ...], device_name: str):
    """A row with a slot comes from the cache, another one from the features: each holds rows that the other lacks."""
    x, random = features(60, *shape), torch.Generator().manual_seed(3)
    hot = torch.randperm(60, generator=random)[:slots]
    slot = torch.full((60,), -1, dtype=torch.int32)
    slot[hot] = torch.arange(slots, dtype=torch.int32)
    rest = x.clone()
    rest[hot] = -1
    node = torch.randint(60, (100,), generator=random)
    cache = Cache(x[hot].to(device_name), slot.to(device_name), counters(torch.device(device_name)))
    same(gathered(rest.to(device_name), node.to(device_name), cache=cache), x, node)
    assert cache.counters.sum(0)[:2].tolist() == [100, int(torch.isin(node, hot).sum())]


def test_tensors_that_need_gradients(device_name: str):
    x = torch.randn(10, 3, device=device_name, requires_grad=True)
    gather(x, torch.tensor([2, 2, 5], device=device_name)).sum().backward()
    assert x.grad is not None and x.grad.sum(1).tolist() == [0, 0, 6, 0, 0, 3, 0, 0, 0, 0]


def test_arguments(device_name: str):
    x, node = torch.randn(10, 4, device=device_name), torch.arange(3, device=device_name)
    with pytest.raises(TypeError, match=r"node: found torch.float32, expected int32 or int64; call node.long\(\)"):
        gather(x, node.float())
    with pytest.raises(ValueError, match=r"node: found shape \[3, 1\], expected one dimension"):
        gather(x, node[:, None])
    with pytest.raises(ValueError, match=r"x: found shape \[4, 10\], layout torch.strided and strides"):
        gather(x.t(), node)
    with pytest.raises(ValueError, match=r"x: found shape \[\]"):
        gather(x[0, 0], node)
    with pytest.raises(ValueError, match="expected a dense tensor"):
        gather(x.to_sparse(), node)
    with pytest.raises(ValueError, match="x: found a tensor on meta, and node on"):
        gather(x.to("meta"), node)
    for out in (x[:3, :3], x.t(), x[:3].double()):
        with pytest.raises(ValueError, match=r"out: found shape .*, expected a contiguous tensor of shape \[3, 4\]"):
            gather(x, node, out)
    out = torch.empty(3, 4, device=device_name)
    assert gather(x, node, out) is out and torch.equal(out, x[:3])


def test_indices_outside_on_the_host():
    for node in (10, -1):
        with pytest.raises(
            IndexError, match=f"node: found rows {min(node, 3)} to {max(node, 3)}, expected 0 to 9, rows of x"
        ):
            gather(torch.randn(10, 4), torch.tensor([3, node]))


OUTSIDE = """
import sys
import torch
from gnncompile.sampling.gather import gather
x, node = torch.randn(10, 4).cuda(), torch.tensor([3, int(sys.argv[1])]).cuda()
try:
    print(gather(x, node).cpu())
except RuntimeError:
    print("stopped")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("node", [10, -1])
def test_indices_outside(node: int):
    """The device stops, so another process must run this."""
    command = [sys.executable, "-c", OUTSIDE, str(node)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "stopped", found.stderr
    assert "node: found a row outside of x" in found.stderr


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    x = torch.zeros(2**31 + 100, 2, dtype=torch.int8, device="cuda")
    node = torch.tensor([0, 2**31 + 99, 2**31 - 1, 5], device="cuda")
    x[node] = torch.arange(8, dtype=torch.int8, device="cuda").view(4, 2)
    assert gather(x, node).flatten().tolist() == list(range(8))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(25,), (100,)], ids=str)
def test_pinned_host_memory(shape: tuple[int, ...]):
    x, node = features(1000, *shape), torch.randint(1000, (5000,))
    same(gather(x.pin_memory(), node.cuda()), x, node)
    with pytest.raises(ValueError, match=r"call x.pin_memory\(\)"):
        gather(x, node.cuda())
