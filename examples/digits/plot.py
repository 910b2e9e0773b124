"""The demo's picture: speed and accuracy of every model, side by side."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from .training import WAYS, Run

matplotlib.use("Agg")  # files only: there may be no screen
import matplotlib.pyplot as plt

COLORS = {"eager": "#9aa0a6", "torch.compile": "#e8833a", "gnncompile": "#2b6cb0"}


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws speed over eager and test accuracy as bars, one group per task and model, and writes a PNG."""
    groups = list(dict.fromkeys((run.task, run.model) for run in runs))
    ways = [way for way in WAYS if any(run.way == way for run in runs)]
    lookup = {(run.task, run.model, run.way): run for run in runs}
    eager = {group: lookup.get((*group, "eager")) for group in groups}

    def speed(group: tuple[str, str], way: str) -> float:
        run, base = lookup.get((*group, way)), eager[group]
        return base.step_ms / run.step_ms if run and run.step_ms and base and base.step_ms else np.nan

    def accuracy(group: tuple[str, str], way: str) -> float:
        run = lookup.get((*group, way))
        return run.accuracy if run and run.accuracy is not None else np.nan

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    width = 0.8 / len(ways)
    for axes, value, form in ((left, speed, "{:.1f}x"), (right, accuracy, "{:.1f}")):
        for offset, way in enumerate(ways):
            heights = [value(group, way) for group in groups]
            places = np.arange(len(groups)) + (offset - (len(ways) - 1) / 2) * width
            bars = axes.bar(places, np.nan_to_num(heights), width, label=way, color=COLORS[way])
            labels = ["failed" if np.isnan(height) else form.format(height) for height in heights]
            axes.bar_label(bars, labels, fontsize=7, padding=1)
        axes.set_xticks(range(len(groups)), [f"{model}\n({task})" for task, model in groups])
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("training steps per second, eager = 1")
    left.axhline(1, color="#9aa0a6", linewidth=0.8, zorder=0)
    left.set_title("Speed")
    reached = [run.accuracy for run in runs if run.accuracy is not None]
    right.set_ylim(max(0, min(reached, default=0) - 10), 101)
    right.set_ylabel("test accuracy, %")
    right.set_title("Accuracy")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
