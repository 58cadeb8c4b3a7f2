"""Ray Train on a cluster of two nodes: the losses of one process, also after a worker is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ray import workers
from tests.ray.workers import NUM_STEPS, SCHEMES, losses_in_process

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def run(
    function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    storage: Path,
    num_workers: int | tuple[int, int] = 4,
    **options: Any,
) -> Any:
    """Run a function on Ray's workers and return its result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            storage_path=str(storage), name="run", failure_config=FailureConfig(max_failures=1)
        ),
        **options,
    ).fit()


def logged(folder: Path) -> dict[int, float]:
    """Return the last loss that rank 0 has written down of each step."""
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return {int(step): float(loss) for step, loss, _ in lines}


@pytest.mark.usefixtures("cluster")
def test_every_scheme_trains_as_in_process(storage: Path) -> None:
    result = run(workers.every_scheme, {"schemes": [*SCHEMES]}, storage)
    reports = result.metrics_dataframe
    print(reports)
