"""`python -m benchmarks.measuring.start`: a process that compiles one model; the subcommand `compile-time` starts it.

Its argument is a JSON object with the fields of `Start`. The process writes another JSON object to `Start.result`.
"""

import importlib
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.names import named
from benchmarks.cases.registry import Case, select
from benchmarks.measuring import counting, measure, phases
from benchmarks.measuring.check import Reference
from benchmarks.measuring.errors import first_line
from benchmarks.measuring.step import Step
from benchmarks.rows.variants import VARIANTS


@dataclass(frozen=True)
class Start:
    """The settings of one process.

    Attributes:
        model: the name of a case.
        graph: the name of its graph.
        row: the name of the way to run it.
        device: the device to run on.
        seed: the seed of parameters and inputs.
        reference: the file of a `Reference`, which holds the right results.
        result: the file to write.
        load: a file of cache artifacts to load first; empty for none.
        save: a file to write cache artifacts to; empty for none.
        suite: the suite of the case.
    """

    model: str
    graph: str
    row: str
    device: str
    seed: int
    reference: str
    result: str
    load: str = ""
    save: str = ""
    suite: str = "guide"

    def text(self) -> str:
        """Returns the argument of the process as JSON."""
        return json.dumps(asdict(self))


def run(start: Start) -> dict[str, Any]:
    """Compiles the model, times the first step and checks its results.

    Returns:
        `status` and `message`; `seconds` of the first step and of loading artifacts; `cpu_seconds` of all threads and
        of the compilers that were run; `phases`; and `hits` and `misses` of torch's caches.
    """
    device = torch.device(start.device)
    (case,) = select(start.suite, start.graph, [start.model])
    (variant,) = named(VARIANTS, [start.row])
    importlib.import_module("torch._inductor.compile_fx")  # imports are not timed
    model, inputs = case.model(device, start.seed), inputs_of(case, device, start.seed)
    reference: Reference = torch.load(start.reference, map_location=device, weights_only=False)
    step = Step(variant.build(model), model, inputs, reference.weights)
    measure.synchronize(device)
    with phases.exclusive(variant.is_ours) as spent:
        begin, cpu = time.perf_counter(), _cpu_seconds()
        if start.load:
            torch.compiler.load_cache_artifacts(Path(start.load).read_bytes())
        step()
        measure.synchronize(device)
        seconds, cpu = time.perf_counter() - begin, _cpu_seconds() - cpu
    verdict = reference.check(step.results())
    if not verdict.ok:
        return {"status": "WRONG", "message": str(verdict)}
    if start.save:
        saved = torch.compiler.save_cache_artifacts()
        Path(start.save).write_bytes(saved[0] if saved is not None else b"")
    hits, misses = counting.cache_hits()
    measured = {"seconds": seconds, "cpu_seconds": cpu, "hits": hits, "misses": misses, "phases": spent}
    return {"status": "ok", "message": "", "error": verdict.error, **measured}


def inputs_of(case: Case, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Returns the inputs of a case. They require gradients, except in the suite `guide`."""
    inputs = case.inputs(device, seed)
    return inputs if case.suite == "guide" else case.with_gradients(inputs)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Runs the start named on the command line."""
    start = Start(**json.loads(sys.argv[1]))
    try:
        result = run(start)
    except Exception as error:
        result = {"status": "FAILED", "message": first_line(error)}
    Path(start.result).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
