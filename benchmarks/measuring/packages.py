"""`python -m benchmarks.measuring.packages`: a process that packages a model, by AOTInductor alone or by gnncompile."""

import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.names import named
from benchmarks.cases.serving import CASES, ServingCase, dynamic_shapes
from benchmarks.measuring import processes
from benchmarks.measuring.processes import ProcessError


class Packages:
    """The packages of all models. Each is made once, in a process of its own, and so is a failure to make it.

    Args:
        folder: where the files are written.
        device: the device that they serve on.
        seed: the seed of the example inputs.
        limit: the seconds after which the making of a package is stopped.
        keep_layout: whether packages of gnncompile also serve with kept layouts.
    """

    def __init__(self, folder: Path, device: torch.device, seed: int, limit: float, keep_layout: bool = False) -> None:
        self.folder, self.device, self.seed, self.limit, self.keep_layout = folder, device, seed, limit, keep_layout
        self.examples: dict[tuple[str, str], str] = {}
        self._failed: dict[tuple[str, str], ProcessError] = {}

    def make(self, kinds: Iterable[str], cases: Sequence[ServingCase]) -> None:
        """Makes the packages of all cases, as many at a time as half of the CPU's cores.

        A failure is raised by `path`.

        Args:
            kinds: "AOTInductor", "gnncompile" or both.
            cases: the cases. The first one of each model is the example of its package.
        """
        first = {case.model_name: case for case in reversed(cases)}
        with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
            made = [pool.submit(self.path, kind, case) for kind in kinds for case in first.values()]
        for one in made:
            error = one.exception()
            if error is not None and not isinstance(error, ProcessError):
                raise error

    def path(self, kind: str, case: ServingCase) -> Path:
        """Returns the package of a case's model. The first case that asks for it is its example.

        Args:
            kind: "AOTInductor" or "gnncompile".
            case: the case.

        Raises:
            ProcessError: the model can't be packaged, or the time is over.
        """
        key, path = (kind, case.model_name), self.folder / f"{kind}-{case.model_name}.pt2"
        if key in self._failed:
            raise self._failed[key]
        if key not in self.examples:
            self.examples[key] = case.name
            settings = {
                "kind": kind,
                "case": case.name,
                "path": str(path),
                "device": str(self.device),
                "seed": self.seed,
                "keep_layout": self.keep_layout,
            }
            try:
                processes.run("packages", settings, self.limit)
            except ProcessError as error:
                self._failed[key] = error
                raise
        return path

    def example(self, kind: str, case: ServingCase) -> str | None:
        """Returns the name of the case whose first request was the example of a package; None without a package."""
        return self.examples.get((kind, case.model_name))


def _package(settings: dict[str, Any]) -> None:
    (case,), device = named(CASES, [settings["case"]]), torch.device(settings["device"])
    model, (request,) = case.model(device), case.requests(1, settings["seed"], device)
    if settings["kind"] == "gnncompile":
        import gnncompile

        gnncompile.package(model, request, settings["path"], keep_layout=settings["keep_layout"])
        return
    program = torch.export.export(model, request, dynamic_shapes=dynamic_shapes(request))  # type: ignore[arg-type]
    torch._inductor.aoti_compile_and_package(program, package_path=settings["path"])


if __name__ == "__main__":
    sys.exit(processes.main(_package))
