"""A server without gnncompile: ``package_server.py PACKAGE CALLS ANSWERS [keep layout]``, for test_package.py.

An answer is a list of tensors, or the text of the error.
"""

import sys

import torch
import torch._inductor.package
from torch.utils._pytree import tree_leaves


def with_kept_layout(package):
    layout = torch._inductor.package.load_package(package, "layout")
    model = torch._inductor.package.load_package(package, "with_layout")
    return lambda *call: model(layout(*call), *call)


def main():
    package, calls, answers, *keeps = sys.argv[1:]
    model = with_kept_layout(package) if keeps else torch._inductor.aoti_load_package(package)
    assert not {"gnncompile", "torch_geometric"} & set(sys.modules)
    found = []
    for call in torch.load(calls):
        try:
            found.append(tree_leaves(model(*call)))
        except RuntimeError as error:
            found.append(str(error))
    torch.save(found, answers)


if __name__ == "__main__":
    main()
