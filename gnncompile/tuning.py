"""The numbers that were tuned by measurement: sizes of tiles and steps, and sizes from which another way is faster.

:data:`TILES` has those of GPUs, :data:`HALF_PRODUCTS` those of GPUs' 16-bit products, and :data:`LOOPS` those of C++
kernels. They change how fast results come, and the order in which numbers are added; so they are no options of users
(:mod:`gnncompile.options`). Numbers that a format, hardware or correctness dictates stand beside their code.

To tune for another kind of device, measure (``python -m benchmarks tiles``), and make another instance of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from gnncompile.half_sizes import H200_HALVES, HalfProductTable
from gnncompile.loop_sizes import XEON, LoopTable
from gnncompile.tile_sizes import H200_PRODUCTS, MomentsTile, ProductTile, ShortRows, Step, WalkTile

_T = TypeVar("_T")

Choices = tuple[tuple[int, int], ...]
"""Pairs of a size and the choice from this size on, in ascending order: see :func:`choice`."""


@dataclass(frozen=True)
class TileTable:
    """The numbers of one kind of GPU.

    An element is one number of a row of features; the width of a row or program is its number of elements, padded to a
    power of two. "Measured" says that ``benchmarks/results/<kind of GPU>/tuning.txt`` has times under the field's name.
    The other numbers were chosen while kernels were written, and no times were kept.
    """

    # -- the tile of a region's rows (codegen/triton/tile.py) ----------------------------------------------------------

    warps: Choices
    """Warps of a program, by its width."""

    rowwise_elements: int
    """Elements of a program that walks no edges."""

    rowwise_warps: Choices
    """Warps of such a program, by the width of a row."""

    combined_width: int
    """Elements per row from which on a reduction combines the edges of each step, rather than after the loop."""

    rows_of_sums: Choices
    """Rows per program of plain sums, by their width; in 16 bits by half of it, except :attr:`sum_width`. Measured."""

    rows_of_others: Choices
    """Rows per program of other regions, by the width of a row."""

    rows_of_attention: int
    """Rows per program of :attr:`combined_width`, if a softmax weights edges by dot products."""

    edges_per_step: int
    """Most edges per step of a row."""

    split_width: int
    """Most elements of a row in one program. Programs share a wider row, unless one must have all its channels."""

    sum_width: int
    """The same limit for a sum of rows of one head, on graphs with :attr:`several_edges`. Measured."""

    several_edges: int
    """Edges per row, on average, from which on :attr:`sum_width` is the limit; rows are short below. Measured."""

    short_rows: ShortRows
    """The tile of short rows, on graphs with fewer edges per row. Measured."""

    many_edges: int
    """Edges per row, on average, from which on a sum of rows has a tile for long rows. Measured."""

    long_step: int
    """Fewest edges per step of the tile for long rows, and fewest channels of a region that has such a tile."""

    long_elements: int
    """Elements of a step of the tile for long rows."""

    long_channels: int
    """Most channels of a program with the tile for long rows; twice as many in 16 bits."""

    heads_width: int
    """Elements of the heads of one program, if programs share the heads of a row. Measured."""

    pair_arithmetic: float
    """Most instructions per element of an edge in a step of two, if one warp sums rows with several heads. Measured."""

    most_steps: int
    """Most steps that the generator unrolls."""

    counted_edges: int
    """Edges of each row that are loaded together, in a program that walks several rows and counts ties."""

    # -- elements per step (codegen/triton/tile.py) --------------------------------------------------------------------

    heavy: int
    """Instructions per element and edge above which arithmetic takes longer than reading rows."""

    weights: int
    """Most weights of linear layers that a warp keeps in registers. More are read again in every step. Measured."""

    step: Step
    """The step of a program that walks one row, unless one of the following applies. Measured."""

    step_of_packed: Step
    """Where packed bools are read or written: words that Triton loads a step ahead take three times as long."""

    step_of_heavy: Step
    """Where arithmetic is :attr:`heavy`. Measured."""

    step_of_weights: Step
    """Where a region reads more weights than :attr:`weights`."""

    step_of_shared_heads: Step
    """Where programs share the heads of a row. Measured."""

    step_of_edge_values: Step
    """Where wide values per edge are written, without dot products. Measured."""

    step_of_softmax: Step
    """Where several wide rows are gathered or channels are reduced, with several heads and a softmax. Measured."""

    step_of_streams: Step
    """The same without a softmax and dot products, in 32 or 64 bits. Measured."""

    step_of_vectors: Step
    """The same where the heads are components of vectors. Measured."""

    step_of_vector_dots: Step
    """The same with dot products over channels, in 32 or 64 bits. Measured."""

    step_of_dots: Step
    """Where several wide rows are gathered or channels are reduced otherwise. Measured."""

    step_of_lanes: Step
    """Where a softmax keeps an accumulator as large as its tile."""

    step_of_one_head: Step
    """Where one head has a softmax, or channels are reduced. Measured."""

    elements_of_several: int
    """Elements of a step per warp, where a program walks several rows. Measured."""

    elements_of_several_heavy: int
    """The same where arithmetic is :attr:`heavy`. Measured."""

    elements_of_several_softmaxes: int
    """The same for softmaxes and for little gathering, of rows wider than :attr:`narrow`. Measured."""

    narrow: int
    """Largest width of a row for which :attr:`elements_of_several_softmaxes` does not apply. Measured."""

    # -- hubs (layout/csr.py, codegen/triton/hub_tile.py) --------------------------------------------------------------

    hub_edges: int
    """Edges of a row above which it is a hub, and edges of each piece of a hub. Measured."""

    hub_share: int
    """A row with fewer edges than this share of all edges (``num_edges / hub_share``) is no hub. Measured."""

    edges_of_piece: int
    """Most edges per step of a piece, and most pieces per step of a joining program: one that joins a hub's pieces."""

    elements_of_piece: int
    """Elements of a step of a piece for each warp, where one wide value per edge is read. Measured."""

    beside: int
    """Most of these elements beside programs of several rows, in a sum of rows; otherwise half of it. Measured."""

    beside_in_lanes: int
    """The same limit for narrow rows: their lanes, combined after the loop, have a register for each element."""

    joining_elements: int
    """Elements of a step of a joining program, for each warp."""

    joining_warps: int
    """Warps of a joining program."""

    few_warps: int
    """The same if several programs share a row of one head and at least :attr:`combined_width` channels. Measured."""

    joined_channels: int
    """Most channels of a joining program. Measured."""

    large_channels: int
    """Most channels of a joining program for a large hub: one with more pieces than others read in a step. Measured."""

    large_pieces: int
    """Most pieces per step of such a program. With few channels, a step has no more elements than others."""

    large_elements: int
    """Least elements of a step of such a program, for each warp."""

    # -- sums over all edges (codegen/triton/kernel.py) ----------------------------------------------------------------

    edge_sum_elements: int
    """Elements of a tile per warp, in a region that sums over all edges."""

    edge_sums: int
    """Sums of a weight gradient that a warp keeps in registers. More sums are spread over more warps."""

    edge_sum_width: int
    """Fewest elements of an edge per warp. Warps with different edges would wait for each other. Measured."""

    edge_sum_warps: int
    """Most warps of a program."""

    edge_sum_programs: int
    """Most programs that share the edges: about as many as a large GPU runs at a time."""

    edge_sum_steps: int
    """Fewest steps of such a program, if there are enough edges."""

    edge_product_edges: int
    """Edges per step of a program whose sums are products of matrices. Measured."""

    edge_product_values: int
    """Most sums and values of edges that a warp of such a program keeps in registers. Measured."""

    edge_product_channels: int
    """Most channels of all products of such a program. More would take more shared memory than some GPUs have."""

    # -- walks in tiles (codegen/triton/tiled_*.py) ------------------------------------------------------------------

    tiled_floats: tuple[tuple[int, WalkTile], ...]
    """Tiles of walks, by the padded channels of the widest value; twice the channels in float64. Measured."""

    tiled_halves: tuple[tuple[int, WalkTile], ...]
    """The same where the factors of products have 16 bits, by these channels times the layers of the walk. Measured."""

    tiled_arithmetic: int
    """Instructions per element and edge up to which a walk with 16 bits mostly waits for memory. Measured."""

    registers: int
    """Registers of a multiprocessor."""

    other_registers: int
    """Registers of a thread of a walk in tiles that hold no values of edges, but addresses and the like."""

    registers_of_layer: int
    """The same for each layer of a walk, where the factors of products have 16 bits. Measured."""

    shared_memory: int
    """Bytes of shared memory of a multiprocessor."""

    shared_memory_of_program: int
    """Bytes of shared memory that CUDA takes for each program, besides what the program uses."""

    tiled_widest: int
    """Most channels of a value. A program holds whole rows of the edges of a tile."""

    tiled_widest_floats: int
    """The same in float32, if the walk gives no values per edge. Measured."""

    tiled_weights: int
    """Most bytes of weights that a program keeps in shared memory. Two programs fit on a multiprocessor with these."""

    tiled_layers: Choices
    """Most layers of one walk in float32 and float64, by the padded channels of the widest value. Measured."""

    tiled_layers_of_halves: Choices
    """The same in types of 16 bits. Measured."""

    most_tiled_layers: int
    """Most layers of a region that is walked in tiles on a GPU. With more, nearly every value would be stored."""

    # -- linear layers of edge features in regions (passes/pre_grad/edge_linears.py) -----------------------------------

    layer_features: int
    """Most features of a layer. With more, computing it in every walk takes longer than reading its rows."""

    layer_features_of_vectors: int
    """The same where rows of vectors read the layer: a walk would compute it for each component."""

    layer_width: int
    """Least width of a layer, of its features or its rows, for which a region is walked in tiles. Not measured."""

    layer_weights: int
    """Most weights of a layer that the programs of a kernel can hold."""

    # -- products of many small matrices (passes/post_grad/expand_small_products.py) -----------------------------------

    small_product: int
    """Most multiplications per matrix of a product that is written out."""

    # -- float32 products on tensor cores (codegen/gemm, ops/gemm.py, passes/post_grad/lower_gemm.py) ------------------

    capability: tuple[int, int]
    """Compute capability of the GPUs on which these kernels are faster than the library's."""

    processors: int
    """Number of multiprocessors of these GPUs."""

    least_over_rows: int
    """Least multiplications of our product over rows, unless it also sums the rows. Below, the library is as fast."""

    least_by_rows: int
    """Least multiplications of our product with a weight. Below, the library is as fast."""

    least_product: int
    """Least elements of the result of our product with a weight: its tiles then occupy many multiprocessors."""

    least_weight: int
    """Least elements of the weight. With fewer, the library's kernel is bound by memory as well as ours."""

    narrowest_product: int
    """Least columns of both matrices. Tensor cores multiply blocks of 16, of which half may be padding."""

    least_summed: int
    """Least elements for our sum of rows. Below, the library needs one launch; our sum always needs two."""

    most_together: int
    """Most rows for which two products over rows share a launch. With more, the time of a launch is negligible."""

    few_rows: int
    """Most rows for which each program splits the weight itself, rather than a launch of its own. Measured."""

    product_of_few: ProductTile
    """The tile for few rows: more programs, with fewer steps each."""

    product_of_many: tuple[tuple[int, ProductTile], ...]
    """The tiles for more rows, by the columns of the weight. A shallow weight has a shallower tile. Measured."""

    product_warps: int
    """Warps of all tiles."""

    split_block: int
    """Elements of a weight that a program splits."""

    over_rows_width: Choices
    """Columns of a tile of a product over rows, and of a sum of rows, by the columns of the matrix. Measured."""

    over_rows_step: int
    """Rows that a program of a product over rows sums per step."""

    over_rows_stages: int
    """Triton's ``num_stages`` of this program."""

    over_rows_warps: Choices
    """Warps of this program, by the sum of both sides of its largest tile."""

    over_rows_programs: Choices
    """Programs that a multiprocessor runs at a time, by the same sum. Measured."""

    steps_per_share: tuple[int, int]
    """Least steps per share of the rows, for one product over rows and for two. Measured."""

    enough_shares: int
    """Least shares to which :attr:`steps_per_share` may reduce their number. Measured."""

    summed_elements: int
    """Elements that a program of a sum of rows reads per step."""

    summed_programs: int
    """Programs of a sum of rows for each multiprocessor."""

    short_warps: int
    """Warps of the programs that split a weight, sum rows and join shares."""

    joined: tuple[int, int]
    """Shares that a program adds up per step to join them, and elements of each share."""


H200 = TileTable(
    warps=((0, 1), (512, 2), (1024, 4), (4096, 8)),
    rowwise_elements=1024,
    rowwise_warps=((0, 4), (8192, 8)),
    combined_width=64,
    rows_of_sums=((0, 8), (16, 4), (64, 2), (128, 1)),
    rows_of_others=((0, 8), (16, 2), (64, 1)),
    rows_of_attention=2,
    edges_per_step=16,
    split_width=1024,
    sum_width=128,
    several_edges=8,
    short_rows=ShortRows(rows=((16, 8), (64, 4)), edges=2, channels=64, widest=128),
    many_edges=32,
    long_step=16,
    long_elements=512,
    long_channels=64,
    heads_width=256,
    pair_arithmetic=15,
    most_steps=4,
    counted_edges=8,
    heavy=48,
    weights=255,
    step=Step(1024, 1),
    step_of_packed=Step(512, 1),
    step_of_heavy=Step(128, 1),
    step_of_weights=Step(512, 1),
    step_of_shared_heads=Step(256, 1),
    step_of_edge_values=Step(256, 1),
    step_of_softmax=Step(512, 1),
    step_of_streams=Step(256, 1),
    step_of_vectors=Step(1024, 1),
    step_of_vector_dots=Step(512, 1),
    step_of_dots=Step(512, 2),
    step_of_lanes=Step(256, 1),
    step_of_one_head=Step(512, 1),
    elements_of_several=128,
    elements_of_several_heavy=64,
    elements_of_several_softmaxes=256,
    narrow=16,
    hub_edges=128,
    hub_share=2**16,
    edges_of_piece=128,
    elements_of_piece=2048,
    beside=4096,
    beside_in_lanes=1024,
    joining_elements=1024,
    joining_warps=8,
    few_warps=2,
    joined_channels=32,
    large_channels=4,
    large_pieces=1024,
    large_elements=256,
    edge_sum_elements=256,
    edge_sums=2048,
    edge_sum_width=128,
    edge_sum_warps=8,
    edge_sum_programs=2048,
    edge_sum_steps=8,
    edge_product_edges=32,
    edge_product_values=6144,
    edge_product_channels=256,
    tiled_floats=((0, WalkTile(64, 4, 3, 3)), (128, WalkTile(64, 4, 2, 3)), (256, WalkTile(32, 8, 1))),
    tiled_halves=((0, WalkTile(32, 4, 4, 3)), (256, WalkTile(32, 4, 3, 3)), (512, WalkTile(32, 8, 1))),
    tiled_arithmetic=20,
    registers=2**16,
    other_registers=24,
    registers_of_layer=4,
    shared_memory=228 * 2**10,
    shared_memory_of_program=2**10,
    tiled_widest=256,
    tiled_widest_floats=64,
    tiled_weights=2**16,
    tiled_layers=((0, 1),),
    tiled_layers_of_halves=((0, 4), (128, 2)),
    most_tiled_layers=4,
    layer_features=32,
    layer_features_of_vectors=4,
    layer_width=16,
    layer_weights=8192,
    small_product=4096,
    capability=(9, 0),
    processors=132,
    least_over_rows=2**25,
    least_by_rows=2**23,
    least_product=2**17,
    least_weight=256,
    narrowest_product=8,
    least_summed=2**16,
    most_together=2**14,
    few_rows=2**14,
    product_of_few=ProductTile(64, 32, 64, 2),
    product_of_many=H200_PRODUCTS,
    product_warps=4,
    split_block=1024,
    over_rows_width=((0, 16), (17, 64), (65, 128)),
    over_rows_step=32,
    over_rows_stages=3,
    over_rows_warps=((0, 4), (256, 8)),
    over_rows_programs=((0, 6), (128, 3), (192, 2), (256, 1)),
    steps_per_share=(3, 5),
    enough_shares=60,
    summed_elements=4096,
    summed_programs=2,
    short_warps=4,
    joined=(128, 16),
)
"""NVIDIA H200. An H100 has the same multiprocessors."""

TILES = H200
"""The table that all GPUs use, since no other was tuned. So all GPUs also add numbers in the same order."""

HALF_PRODUCTS: HalfProductTable = H200_HALVES
"""The table of 16-bit products that all GPUs use."""

LOOPS: LoopTable = XEON
"""The table that all processors use."""


def choice(choices: tuple[tuple[int, _T], ...], size: float) -> _T:
    """Returns the choice for a size: that of the largest size in `choices` that is not above it."""
    return next(one for least, one in reversed(choices) if size >= least)


COLUMN_SUMS = {"XBLOCK": 64, "R0_BLOCK": 16, "num_warps": 2, "num_stages": 1}
"""The tile of Inductor's sums of many rows by column on a GPU, in Inductor's names. Measured."""

LEAST_COLUMN_SUMS = 2**15
"""Fewest sums of a kernel with this tile; Inductor splits the rows into parts, and sums each part."""

MOMENTS = MomentsTile(rows=64, columns=64, stages=3, programs=4, warps=4, joined=(256, 4))
"""The tile of means and variances of columns, on all GPUs."""

LEAST_MOMENTS = 2**20
"""Fewest elements of a matrix whose means and variances our kernel computes. Inductor is as fast for smaller ones."""
