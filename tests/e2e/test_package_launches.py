"""How much a call of a package for a GPU launches, with and without a layout that the caller keeps."""

import pytest

from gnncompile.serving.kept_layout import WITH_LAYOUT
from gnncompile.serving.package import MODEL
from tests.e2e.test_package_gpu import as_packaged, interpreted, named_model, traced_call
from tests.e2e.test_package_models import inputs_of
from tests.package_launches import code_of, own_launches, torchs_launches

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SMALL, LARGER = (30, 90, 3), (600, 5000, 3)
OWN = {MODEL: {SMALL: 3, LARGER: 12}, WITH_LAYOUT: {SMALL: 3, LARGER: 4}}
"""The most launches of our kernels in a call, but for products, of any model with two layers.

Without a kept layout a small graph takes one launch to sort, and one for each layer. A larger one takes seven to sort,
one to list hubs, and two for each layer. With a kept layout one launch, or two, compare its seal. One more checks
the kept order by which a package of GINE reads features of edges.
"""

PRODUCTS = {"SAGE": 3, "GAT": 2, "GINE": 2}
"""The products of a call. The two of a layer of GraphSAGE are one launch, but not those of the narrow second layer."""

TORCHS = {"SAGE": {MODEL: 1, WITH_LAYOUT: 0}, "GAT": {MODEL: 3, WITH_LAYOUT: 2}, "GINE": {MODEL: 1, WITH_LAYOUT: 1}}
"""The most kernels of Inductor's and products of torch's library in a call. There are no products."""


@pytest.mark.parametrize("name", TORCHS)
def test_own_launches_of_a_call(name, monkeypatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    model, names = named_model(name)
    call = traced_call(model, names)
    kept = call.with_kept_layout(compares=True)
    programs = {which: as_packaged(one.program) for which, one in {MODEL: call.plain(), **kept}.items()}
    for size in (SMALL, LARGER):
        given = inputs_of(names, size)
        layout = programs["layout"](*given)
        for which, arguments in ((MODEL, given), (WITH_LAYOUT, (layout, *given))):
            found = own_launches(programs[which], arguments, monkeypatch)
            assert found.pop("by_rows") == PRODUCTS[name]
            most = OWN[which][size] + (which == WITH_LAYOUT and name == "GINE")
            assert sum(found.values()) <= most, (which, size, found)


@pytest.mark.slow
@pytest.mark.parametrize("which", [MODEL, WITH_LAYOUT])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_launches_of_a_call(name, which, monkeypatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    model, names = named_model(name)
    call = traced_call(model, names)
    traced = call.plain() if which == MODEL else call.with_kept_layout(compares=True)[which]
    code = code_of(traced, monkeypatch)
    found = torchs_launches(code)
    assert sum(found.values()) <= TORCHS[name][which] and not found["products"], found
    calls = [line for line in code.splitlines() if "gnncompile::launch(" in line and "stream" in line]
    assert calls and not any("reinterpret" in line for line in calls), "a view is made for a kernel, which needs none"
