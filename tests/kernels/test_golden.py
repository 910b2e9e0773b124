"""The generated source of ten regions, as text: a change of a generator shows in the diff of these files.

``pytest tests/kernels/test_golden.py --update-golden`` writes them anew. They say what is generated, not that it is
right: other tests run the kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)
from gnncompile.codegen.cpp.kernel import CppKernel
from gnncompile.codegen.cpp.source import source as cpp_source
from gnncompile.codegen.triton.kernel import TritonKernel
from gnncompile.ir.region import Space

FOLDER = Path(__file__).parent / "golden"

REGIONS = (
    triton_regions.neighbour_sum,
    triton_regions.weighted_sum,
    triton_regions.mean,
    triton_regions.max_and_min,
    triton_regions.edge_relu,
    triton_regions.attention,
    triton_regions.attention_gradient,
    triton_regions.weighed_sums,
    triton_regions.edge_values,
    triton_regions.mixed_widths,
)


def _sources(case: triton_regions.Case) -> dict[str, str]:
    """What is generated for a region of 4 heads of 32 channels, by file."""
    region = case(Space.DESTINATION, "float32", 4, 32)
    kernel = TritonKernel(region)
    texts = "\n\n".join([kernel.text, *kernel.hub_texts])
    return {f"{case.__name__}.triton.txt": texts, f"{case.__name__}.cpp.txt": cpp_source(region)}


@pytest.mark.parametrize("case", REGIONS, ids=lambda case: case.__name__)
def test_sources_are_those_of_the_golden_files(case: triton_regions.Case, request: pytest.FixtureRequest):
    for name, text in _sources(case).items():
        file = FOLDER / name
        if request.config.getoption("--update-golden"):
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"{name} is missing: run this test with --update-golden"
        assert text == file.read_text(encoding="utf-8"), f"{name} differs: look at it, and run with --update-golden"


def test_there_are_no_other_golden_files():
    assert {file.name for file in FOLDER.iterdir()} == {name for case in REGIONS for name in _sources(case)}


def test_golden_kernels_are_those_that_run():
    region = triton_regions.neighbour_sum(Space.DESTINATION, "float32", 4, 32)
    assert CppKernel(region).listing == cpp_source(region)
