"""One loss curve of a run that goes on from mesh to mesh, beside a single device's.

    python -m tests.benchmarks.resume_curve [--plot FILE.png]

Prints the largest difference; in float64 nothing but the order of sums is left of it.
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

from lightning_shard.core.reporting.output import new_figure
from tests.strategies.hybrid_parallel.test_checkpoints import MESHES, STEPS, curve_over


def draw(path: Path, losses: list[float], expected: list[float]) -> None:
    """Write the picture: a stretch of the curve for each mesh."""
    figure = new_figure(path, size=(9, 4.5), otherwise="The command without --plot needs nothing.")
    axes = figure.add_subplot()
    for number, mesh in enumerate(MESHES):
        steps = range(number * STEPS, (number + 1) * STEPS)
        axes.plot(steps, losses[steps.start : steps.stop], "o-", label=mesh)
    axes.plot(expected, "k:", label="single device throughout")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train both, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        losses, _ = curve_over(list(MESHES), Path(folder), "gpt_8")
        expected, _ = curve_over(["single device"] * len(MESHES), Path(folder), "gpt_8")
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"{len(losses)} steps over {', '.join(MESHES)}: largest relative difference {worst:.1e}")
    if options.plot is not None:
        draw(options.plot, losses, expected)


if __name__ == "__main__":
    main()
