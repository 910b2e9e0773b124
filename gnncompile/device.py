"""The kinds of devices, and how they differ. Code asks for the fact that it depends on, not for the name of a kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from gnncompile import tuning

HALVES = (torch.bfloat16, torch.float16)
"""The floating-point types of 16 bits."""

_ZEN_5 = 26
"""The family of AMD's first processors that compute vectors of 512 bits in one step."""

_STORED_LAYER = 64
"""Fewest features of layers whose results are stored on these processors."""

ALIGNMENT = 16
"""Bytes. Kernels for GPUs read vectors from addresses that are multiples of this. Inductor copies other inputs."""


def aligned_length(elements: int, element_bytes: int) -> int:
    """Returns the fewest elements, no fewer than `elements`, after which a tensor in the same memory is aligned."""
    step = max(ALIGNMENT // element_bytes, 1)
    return -(-elements // step) * step


@dataclass(frozen=True)
class Device:
    """A device, and the facts that code depends on. :func:`device_of` makes it.

    The attributes are fixed. The properties are read at each call, because the environment may change.

    Attributes:
        place: The device as torch knows it.
        has_streams: Whether work is queued on streams, and events tell when it is done.
        can_be_recorded: Whether work can be captured in CUDA graphs.
        host_waits: Whether the host waits when it reads data, because the memory is not the host's.
        finds_hubs_early: Whether the hubs of a layout are found when the layout is built. Else a kernel that needs them
            finds them at its launch.
        has_random_state: Whether the device has its own state of random numbers, besides the host's.
        has_addresses: Whether an address stands for memory, so that views by address are possible.
        copies_unaligned: Whether Inductor copies an input whose address is not aligned, in each call.
        fuses_bias: Whether the library applies a bias and a ReLU within a product.
        is_cpp_in_inductor: Whether Inductor writes C++ for the device.
        usual_generator: The generator of its kernels, unless the environment asks for another one.
        computes_in_vectors: Whether torch computes neighbours in memory together, and what is left over otherwise.
    """

    place: torch.device
    has_streams: bool
    can_be_recorded: bool
    host_waits: bool
    finds_hubs_early: bool
    has_random_state: bool
    has_addresses: bool
    copies_unaligned: bool
    fuses_bias: bool
    is_cpp_in_inductor: bool
    usual_generator: str
    computes_in_vectors: bool

    @property
    def generator(self) -> str:
        """The generator of the device's kernels: ``"triton"``, ``"cpp"`` or ``"reference"``.

        ``GNNCOMPILE_KERNELS`` overrides it: ``triton`` on a CPU runs the Triton interpreter, ``reference`` turns
        generated code off. Beside a GPU, Triton compiles for the GPU unless ``TRITON_INTERPRET`` is set. Its kernels
        can't read a CPU's memory then, so ``triton`` is for the GPU alone.
        """
        chosen = os.environ.get("GNNCOMPILE_KERNELS", "")
        if chosen == "triton" and not self.has_streams and _is_for_gpus_alone():
            return self.usual_generator
        if chosen in ("triton", "cpp", "reference"):
            return chosen
        return self.usual_generator

    @property
    def runs_triton(self) -> bool:
        """Whether the device runs Triton's kernels, those for products and for sums of rows included."""
        return self.generator == "triton"

    @property
    def walks_tiles(self) -> bool:
        """Whether linear layers of edges are computed within regions, of widths up to :meth:`widest_tile`."""
        return self.generator in ("cpp", "triton")

    def widest_tile(self, dtype: torch.dtype, has_states: bool) -> int:
        """Most channels of a value in a region that is walked in tiles.

        Args:
            dtype: The type of the region's results.
            has_states: Whether the region gives values per edge. Otherwise float32 pays for few channels only.
        """
        if not self.runs_triton:
            return tuning.LOOPS.widest_pairs if dtype in HALVES else sys.maxsize
        few = not has_states and dtype not in HALVES
        return tuning.TILES.tiled_widest_floats if few else tuning.TILES.tiled_widest

    @property
    def most_tiled_layers(self) -> int:
        """Most layers of a region that is walked in tiles."""
        return tuning.TILES.most_tiled_layers if self.runs_triton else sys.maxsize

    def walks_layers(self, dtype: torch.dtype) -> bool:
        """Whether layers of a type are faster in a region than in the library, though a backward computes them again.

        On a CPU a walk multiplies 16-bit values in float32, unless :attr:`multiplies_pairs` holds. A library that
        multiplies bfloat16 itself takes half the time. Measured on a CPU with AVX512-BF16, with SchNet in bfloat16;
        float16 and other CPUs follow it unmeasured. Walks by pairs pay up to :meth:`widest_tile`, with several layers.
        """
        return self.runs_triton or dtype not in HALVES or (dtype is torch.bfloat16 and self.multiplies_pairs)

    def walks_one_layer(self, dtype: torch.dtype) -> bool:
        """Whether a region pays for one layer. On a GPU it always does if other operations read rows of the layer.

        Otherwise the library multiplies faster, although it stores the rows. With EdgeConv in float32 on an H100, the
        library takes 2.7 ms and a region 6.2 ms.
        """
        return not self.runs_triton and dtype not in HALVES

    @property
    def multiplies_in_own_vectors(self) -> bool:
        """Whether generated C++ multiplies matrices itself, in vectors of 512 bits, instead of calling torch's library.

        Intel's library takes vectors of 256 bits on processors of other makers. On an AMD EPYC 9005 it reaches 100
        GFLOP/s per core in float32, and vectors of 512 bits 240 GFLOP/s. Other processors of AMD follow it unmeasured.
        """
        return self.place.type == "cpu" and self.generator == "cpp" and _library_halves_vectors()

    @property
    def multiplies_pairs(self) -> bool:
        """Whether these products of generated C++ multiply pairs of bfloat16 values, by AVX512-BF16."""
        return self.multiplies_in_own_vectors and "avx512_bf16" in _flags()

    @property
    def stored_layers(self) -> int:
        """Fewest features of layers in regions whose results a forward stores for its gradient; 0 if none are stored.

        Otherwise the gradient computes the layers again. A layer of K features and C channels takes ``2 K C``
        floating-point operations per edge; storing its result moves ``12 C`` bytes. Where a core multiplies at 100
        GFLOP/s and moves 10 GB/s, storing pays for more than 60 features. Measured on an EPYC of family 25 with one
        thread, with stored layers and without: SchNet 82 ms and 26 MiB, 93 ms and 9 MiB; MeshGraphNet 184 ms and 101
        MiB, 208 ms and 62 MiB.
        """
        return _STORED_LAYER if self.place.type == "cpu" and self.generator == "cpp" and _halves_vectors() else 0

    @property
    def small_product(self) -> int:
        """Most multiplications per matrix of a product of many matrices that is written out."""
        return tuning.TILES.small_product if self.runs_triton else tuning.LOOPS.small_product

    @property
    def has_tuned_products(self) -> bool:
        """Whether our products for GPUs are faster than the library's. Triton's interpreter runs ours, for tests."""
        if not self.runs_triton:
            return False
        return not self.has_streams or torch.cuda.get_device_capability(self.place) == tuning.TILES.capability

    @property
    def multiplies_in_parts(self) -> bool:
        """Whether float32 products should be computed as sums of bfloat16 products.

        They are where that is faster, unless the user chose the less accurate TensorFloat32
        (``torch.backends.cuda.matmul.fp32_precision``).
        """
        return self.has_tuned_products and torch.backends.cuda.matmul.fp32_precision != "tf32"

    @property
    def has_faster_products(self) -> bool:
        """Whether float32 products of many rows should be ours instead of the library's."""
        return self.multiplies_in_parts or self.multiplies_in_own_vectors

    def has_own_products(self, dtype: torch.dtype) -> bool:
        """Whether products of many rows of a dtype should be ours instead of the library's."""
        return self.has_faster_products if dtype is torch.float32 else dtype in HALVES and self.has_tuned_products

    def computes_product(self, dtype: torch.dtype, depth: int, columns: int) -> bool:
        """Whether products of many rows with a weight `[depth, columns]` of this dtype should be ours."""
        halves = tuning.HALF_PRODUCTS
        if not self.multiplies_widths(dtype, (depth, columns), halves.widest):
            return False
        if dtype in HALVES:
            return halves.library_is_slow(depth, columns) or depth * columns >= halves.least_weight
        return depth * columns >= self.least_weight

    def multiplies_widths(self, dtype: torch.dtype, widths: Sequence[int], widest: int) -> bool:
        """Whether kernels of our own multiply matrices with these numbers of columns, in 16 bits at most `widest`."""
        fit = min(widths) >= self.narrowest_product and (dtype not in HALVES or max(widths) <= widest)
        return fit and self.has_own_products(dtype)

    def has_enough_rows(self, rows: int | None, depth: int, columns: int) -> bool:
        """Whether a product of rows with a weight `[depth, columns]` is large enough for our kernels.

        None is an unknown number of rows, which is taken for large.
        """
        return rows is None or rows * depth * columns >= self.least_product

    @property
    def least_product(self) -> int:
        """Least multiplications of a product with a weight that is ours. Below, the library is as fast."""
        return tuning.TILES.least_by_rows if self.runs_triton else least_product_in_vectors()

    @property
    def least_weight(self) -> int:
        """Least elements of the weight of such a product in float32."""
        return tuning.TILES.least_weight if self.runs_triton else tuning.LOOPS.least_weight

    @property
    def narrowest_product(self) -> int:
        """Least columns of both matrices of such a product. On a GPU, half of a block of 16 may be padding."""
        return tuning.TILES.narrowest_product if self.runs_triton else tuning.LOOPS.narrowest_product

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph.

        The device is asked first, since a build of torch for CPUs can't be asked.
        """
        return self.can_be_recorded and torch.cuda.is_current_stream_capturing()

    @property
    def name(self) -> str:
        """The name of the device for people."""
        return torch.cuda.get_device_name(self.place) if self.has_streams else self.place.type


def _is_for_gpus_alone() -> bool:
    """Whether Triton compiles its kernels for a GPU, rather than interprets them."""
    return torch.cuda.is_available() and not is_on(os.environ.get("TRITON_INTERPRET", ""))


def is_on(value: str) -> bool:
    """Whether the value of an environment variable turns on what the variable names."""
    return value.lower() in ("1", "true", "yes", "on")


@lru_cache(maxsize=1)
def _library_halves_vectors() -> bool:
    """Whether torch multiplies by Intel's library, on a processor of AMD with vectors of 512 bits."""
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return any(line.split() == ["vendor_id", ":", "AuthenticAMD"] for line in _cpuinfo())


def least_product_in_vectors() -> int:
    """Returns the least multiplications of a product with a weight that generated C++ computes itself."""
    return tuning.LOOPS.least_product_in_halves if _halves_vectors() else tuning.LOOPS.least_product


@lru_cache(maxsize=1)
def _halves_vectors() -> bool:
    """Whether it is a processor of AMD that computes vectors of 512 bits in two halves: up to family 25, Zen 4."""
    families = [line.split()[-1] for line in _cpuinfo() if line.startswith("cpu family")]
    return _library_halves_vectors() and bool(families) and int(families[0]) < _ZEN_5


@lru_cache(maxsize=1)
def _flags() -> frozenset[str]:
    """Returns the names of the processor's extensions."""
    return frozenset(flag for line in _cpuinfo() if line.startswith("flags") for flag in line.split())


def _cpuinfo() -> list[str]:
    """Returns the lines in which Linux describes the processors; none on another system."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.readlines()
    except OSError:
        return []


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=256)
def device_of(place: torch.device | str) -> Device:
    """Returns the facts about a device.

    Args:
        place: The device of a tensor, or a device's name such as ``"cuda"``.
    """
    place = torch.device(place)
    is_gpu, is_host = place.type == "cuda", place.type == "cpu"
    return Device(
        place,
        has_streams=is_gpu,
        can_be_recorded=is_gpu,
        host_waits=not is_host,
        finds_hubs_early=not is_host,
        has_random_state=is_gpu,
        has_addresses=is_gpu or is_host,
        copies_unaligned=is_gpu,
        fuses_bias=is_gpu,
        is_cpp_in_inductor=is_host,
        usual_generator="cpp" if is_host else "triton",
        computes_in_vectors=is_host,
    )
