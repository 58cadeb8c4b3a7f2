"""Ray Train on a cluster of two nodes: the losses of one process, also after a worker is lost."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lightning_shard.ray import CHECKPOINT_NAME
from tests.ray import workers
from tests.ray.conftest import SECOND_NODE
from tests.ray.workers import NUM_STEPS, SCHEMES, losses_in_process

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def run(
    function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    storage: Path,
    num_workers: int | tuple[int, int] = 4,
    max_failures: int = 0,
    filesystem: Any = None,
    num_cpus: float = 1.0,
    **options: Any,
) -> Any:
    """Run a function on Ray's workers and return its result."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            resources_per_worker={"CPU": num_cpus},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            storage_path="inner" if filesystem else str(storage),
            storage_filesystem=filesystem,
            name="run",
            failure_config=FailureConfig(max_failures=max_failures),
        ),
        **options,
    ).fit()


def logged(folder: Path) -> list[tuple[int, float, int]]:
    """Return the steps, losses and numbers of ranks that rank 0 has written down."""
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [(int(step), float(loss), int(num_ranks)) for step, loss, num_ranks in lines]


def curve(folder: Path) -> list[float]:
    """Return the last loss of each step."""
    losses = {step: loss for step, loss, _ in logged(folder)}
    assert [*losses] == [*range(1, NUM_STEPS + 1)]
    return [*losses.values()]


@pytest.mark.usefixtures("cluster")
def test_every_scheme_trains_as_in_process(tmp_path: Path) -> None:
    schemes = [scheme for scheme in SCHEMES if scheme != "elastic"]
    config = {"schemes": schemes, "folder": str(tmp_path)}
    run(workers.every_scheme, config, tmp_path / "storage")
    for scheme in schemes:
        expected = losses_in_process(scheme, 4)
        assert len(expected) == NUM_STEPS
        for rank in range(4):
            told = eval((tmp_path / f"{scheme}-{rank}").read_text())
            assert told["losses"] == pytest.approx(expected, rel=1e-5), scheme
            assert told["place"] == (rank % 2, rank // 2, 4)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("scheme", "checkpoint_format"),
    [("zero3", "sharded"), ("tensor_parallel", "sharded"), ("local_sgd", "full")],
)
def test_a_killed_worker_is_started_again_and_the_curve_stays(
    scheme: str, checkpoint_format: str, tmp_path: Path
) -> None:
    config = {"scheme": scheme, "format": checkpoint_format, "folder": str(tmp_path)}
    storage = tmp_path / "storage"
    result = run(workers.killed_once, config, storage, num_workers=2, max_failures=1)
    assert (tmp_path / "killed").exists()
    steps = [step for step, _, _ in logged(tmp_path)]
    assert steps in ([*range(1, last + 1), *range(11, NUM_STEPS + 1)] for last in (12, 13))
    assert curve(tmp_path) == pytest.approx(losses_in_process(scheme, 2), rel=1e-5)
    reported = Path(result.checkpoint.path, CHECKPOINT_NAME)
    assert reported.is_dir() == (checkpoint_format == "sharded")
    assert (result.metrics["step"], result.metrics["epoch"]) == (NUM_STEPS, 0)
    assert result.metrics["loss"] > 0


@pytest.mark.usefixtures("cluster")
def test_storage_that_no_node_mounts_gets_full_checkpoints(tmp_path: Path) -> None:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    (tmp_path / "far").mkdir()
    filesystem = SubTreeFileSystem(str(tmp_path / "far"), LocalFileSystem())
    config = {"scheme": "zero3", "format": "full", "folder": str(tmp_path)}
    result = run(
        workers.killed_once, config, tmp_path, num_workers=2, max_failures=1, filesystem=filesystem
    )
    assert curve(tmp_path) == pytest.approx(losses_in_process("zero3", 2), rel=1e-5)
    assert (tmp_path / "far" / result.checkpoint.path / CHECKPOINT_NAME).is_file()


@pytest.mark.usefixtures("cluster")
def test_storage_that_no_node_mounts_refuses_folders(tmp_path: Path) -> None:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    filesystem = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    config = {"scheme": "zero3", "format": "sharded", "folder": str(tmp_path)}
    with pytest.raises(Exception, match="use checkpoint_format='full'"):
        run(workers.killed_once, config, tmp_path, num_workers=1, filesystem=filesystem)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("scheme", "num_models"), [("zero2", 4), ("tensor_parallel", 2)])
def test_ranks_of_a_model_share_rows_and_none_is_left_out(
    scheme: str, num_models: int, tmp_path: Path
) -> None:
    import ray.data

    run(
        workers.on_a_dataset,
        {"scheme": scheme, "folder": str(tmp_path)},
        tmp_path / "storage",
        num_cpus=0.5,  # reading needs some
        datasets={"rows": ray.data.range(64)},
    )
    ranks = json.loads((tmp_path / "ranks").read_text())
    models = [
        [ranks[rank] for rank in range(k, k + 4 // num_models)]
        for k in range(0, 4, 4 // num_models)
    ]
    for of_model in models:
        assert all(batches == of_model[0] for batches in of_model)
    num_batches = 64 // 4 // num_models
    for epoch in range(2):
        first, stop = epoch * num_batches, (epoch + 1) * num_batches
        rows = [row for of_model in models for batch in of_model[0][first:stop] for row in batch]
        assert sorted(rows) == [*range(64)]


def test_an_elastic_fit_goes_on_with_the_nodes_that_are_left(cluster: Any, tmp_path: Path) -> None:
    """Ray's scaling policy makes the group smaller; the global batch and the curve stay."""
    node = next(one for one in cluster.list_all_nodes() if one is not cluster.head_node)

    def take_away() -> None:
        while not (tmp_path / "log").exists() or logged(tmp_path)[-1][0] < 8:
            time.sleep(0.1)
        cluster.remove_node(node, allow_graceful=False)

    remover = Thread(target=take_away, daemon=True)
    remover.start()
    config = {"folder": str(tmp_path)}
    try:
        run(workers.shrinking, config, tmp_path / "storage", num_workers=(1, 4), max_failures=3)
        remover.join()
    finally:
        cluster.add_node(**SECOND_NODE)  # for the tests that follow
    lines = logged(tmp_path)
    before = [(step, loss) for step, loss, num_ranks in lines if num_ranks == 4]
    halves = [(step, loss) for step, loss, num_ranks in lines if num_ranks == 2]
    assert len(lines) == len(before) + len(halves)
    after = [  # two batches of each rank are a step
        (step, first + second)
        for (_, first), (step, second) in zip(halves[::2], halves[1::2], strict=True)
    ]
    assert [step for step, _ in before] == [*range(1, 9)]
    assert [step for step, _ in after] == [*range(7, NUM_STEPS + 1)]  # behind the last snapshot
    expected = dict(enumerate(losses_in_process("elastic", 4), start=1))
    for step, loss in [*before, *after]:
        assert loss == pytest.approx(expected[step], rel=1e-4), step
    assert not list(Path("/dev/shm").glob("lightning_shard-*-ray-*"))
