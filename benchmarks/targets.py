"""How much faster than others a row is meant to be, and how fast on a known GPU."""

from dataclasses import dataclass

# Times in milliseconds are judged on GPUs with this in their names.
TIMED_ON = "H200"


@dataclass(frozen=True)
class Target:
    """Least ratios of the others' times to ours, and the longest time; None where there is nothing to reach.

    Attributes:
        over_eager: over eager PyTorch.
        over_compile: over the faster of `torch.compile` and `torch.compile(dynamic=True)`.
        milliseconds: on an H200; other devices are not judged by it.
    """

    over_eager: float | None = None
    over_compile: float | None = None
    milliseconds: float | None = None

    def verdict(
        self, over_eager: float | None, over_compile: float | None, milliseconds: float | None = None, device: str = ""
    ) -> str:
        """Compares measured ratios, and the time if the device's name says that it may be; None means no time.

        Returns:
            `ok` if all that was measured is reached, `SHORT` if something is missed, and `no baseline` if nothing could
            be compared, because the others crashed or were left out, or the device is another one.
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
