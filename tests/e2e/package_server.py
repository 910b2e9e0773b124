"""A server without gnncompile: ``package_server.py PACKAGE CALLS ANSWERS``, for test_package.py.

An answer is a list of tensors, or the text of the error.
"""

import sys

import torch
from torch.utils._pytree import tree_leaves


def main():
    package, calls, answers = sys.argv[1:]
    model = torch._inductor.aoti_load_package(package)
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
