"""Serving: a trained, compiled model becomes one file, which a server without its code loads, compiles and warms up.

    python examples/serving.py                                  train, export, and serve from another process, twice
    python examples/serving.py --aot                            a package of AOTInductor beside it

``torch.export`` takes a compiled model for what it is: the file holds the original, for all sizes of graphs. Compiling
what was loaded gives the same fused kernels as compiling the model. Start-up is what caches are for: the server's stand
in the folder that is shipped, so that its second start, or that on the next machine of this kind, builds nothing.

A package of AOTInductor runs without Python, and so without gnncompile, whose kernels are chosen, built and called by
Python: it holds the plain model, at plain speed. Take it where there is no Python, and gnncompile where there is.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
import torch.nn.functional as F
from digits import data as digits
from torch.export import Dim
from torch_geometric.nn.models import GraphSAGE

import gnncompile
from gnncompile import testing

SIZES = (500, 2000, 1, 8000)  # nodes of the graphs that the server is asked about


def request(num_nodes):
    data = testing.uniform(num_nodes, 10 * num_nodes, channels=64, seed=num_nodes)
    return data.x, data.edge_index


def train_and_export(folder, args):
    """Trains on digits; returns the model as it was exported."""
    data = digits.images_as_nodes()
    model = gnncompile.compile(GraphSAGE(data.num_features, args.hidden_channels, 2, digits.NUM_CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_index], data.y[data.train_index]).backward()
        optimizer.step()
    right = out.argmax(dim=-1)[data.test_index] == data.y[data.test_index]
    print(f"Trained: test accuracy {float(right.float().mean()):.4f}.")

    sizes = {"x": {0: Dim.DYNAMIC}, "edge_index": {1: Dim.DYNAMIC}}
    program = torch.export.export(model.eval(), (data.x, data.edge_index), dynamic_shapes=sizes)
    torch.export.save(program, folder / "model.pt2")
    if args.aot:
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "aot.pt2"))
    return program.module()


@torch.no_grad()
def serve(folder):
    """The server: answers all requests, and reports how long it took to start and to answer."""
    start = time.perf_counter()
    model = torch.export.load(folder / "model.pt2").module()
    served = {"eager": model, "gnncompile": gnncompile.compile(model).warmup(*request(100))}
    began = time.perf_counter() - start
    if (folder / "aot.pt2").exists():
        served["AOTInductor"] = torch._inductor.aoti_load_package(str(folder / "aot.pt2"))
    steps = {name: common.Steps(torch.device("cpu")) for name in served}
    answers = {name: [model(*request(size)) for size in SIZES] for name, model in served.items()}
    for name, model in served.items():
        for _ in range(20):
            steps[name](model, *request(SIZES[-1]))
    torch.save(answers, folder / "answers.pt")
    print(json.dumps({"started in s": round(began, 2), **{name: round(each.ms, 2) for name, each in steps.items()}}))


def ask(folder, own_caches):
    """Starts the server as another process; returns what it reported."""
    env = dict(os.environ)
    if own_caches:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache" / "inductor")
        env["GNNCOMPILE_CACHE_DIR"] = str(folder / "cache" / "gnncompile")
    command = [sys.executable, __file__, "--serve", str(folder)]
    return json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main():
    parser = common.parser(__doc__, hidden_channels=128, lr=0.01, epochs=50)
    parser.add_argument("--aot", action="store_true", help="compare with a package of AOTInductor")
    parser.add_argument("--serve", type=Path, help="be the server of what is in this folder")
    args = common.parse(parser, epochs=20, hidden_channels=64)
    if args.serve:
        serve(args.serve)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exported = train_and_export(folder, args)
        for start in ("first",) if args.quick else ("first", "second"):
            found = ask(folder, own_caches=not args.quick)
            print(f"The server's {start} start took {found.pop('started in s')} s.")
        print(f"ms per graph of {SIZES[-1]} nodes: {', '.join(f'{way} {ms}' for way, ms in found.items())}")
        answers = torch.load(folder / "answers.pt")
    with torch.no_grad():
        expected = [exported(*request(size)) for size in SIZES]
    apart = max(float((a - b).abs().max()) for each in answers.values() for a, b in zip(each, expected, strict=True))
    agree = apart <= 1e-4 * max(float(each.abs().max()) for each in expected)
    print(
        f"{'All agree' if agree else 'PROBLEM'}: answers of the server differ by {apart:.0e} from the exported model's."
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
