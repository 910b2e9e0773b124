"""Targets: the speed-up that a row should reach over other rows, and its time on a known GPU."""

from dataclasses import dataclass

# Times in milliseconds are only judged on GPUs whose names contain this.
TIMED_ON = "H200"


@dataclass(frozen=True)
class Target:
    """The least speed-ups of gnncompile and its longest time; None where there is no target.

    Attributes:
        over_eager: the speed-up over eager PyTorch.
        over_compile: the speed-up over the faster of `torch.compile` and `torch.compile(dynamic=True)`.
        milliseconds: the time on an H200; other devices are not judged by it.
    """

    over_eager: float | None = None
    over_compile: float | None = None
    milliseconds: float | None = None

    def verdict(
        self, over_eager: float | None, over_compile: float | None, milliseconds: float | None = None, device: str = ""
    ) -> str:
        """Compares measured speed-ups, and the time if the device is an H200; None stands for a missing measurement.

        Returns:
            `ok` if every measured target is reached, `SHORT` if a target is missed, and `no baseline` if nothing could
            be compared: the other rows crashed or were left out, or the device is another one.
        """
        wanted = ((self.over_eager, over_eager), (self.over_compile, over_compile))
        compared = [found >= least for least, found in wanted if least is not None and found is not None]
        if self.milliseconds is not None and milliseconds is not None and TIMED_ON in device:
            compared.append(milliseconds <= self.milliseconds)
        if not compared:
            return "no baseline"
        return "ok" if all(compared) else "SHORT"

    def __str__(self) -> str:
        wanted = (("eager", self.over_eager), ("compile", self.over_compile))
        parts = [f"{least:g}x {name}" for name, least in wanted if least is not None]
        if self.milliseconds is not None:
            parts.append(f"{self.milliseconds:g} ms on an {TIMED_ON}")
        return ", ".join(parts)
