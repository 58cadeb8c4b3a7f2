"""Two checkouts are compared in one run, and one that has become slower is found."""

import shutil
from pathlib import Path

import pytest

from tests.benchmarks.against import REPOSITORY, Comparison, checkout, time_checkouts
from tests.benchmarks.timing import Record

NAMES = ("ddp", "local", "zero1")


def records(**seconds: float) -> dict[str, Record]:
    return {
        name: Record(step_seconds=[one] * 3, cpu_seconds=[1.0]) for name, one in seconds.items()
    }


@pytest.mark.parametrize(("zero1", "slower"), [(1.02, []), (1.04, ["zero1"]), (0.5, [])])
def test_what_is_beyond_the_limit_is_slower(zero1: float, slower: list[str]) -> None:
    before = records(ddp=1.0, local=1.0, zero1=1.0)
    assert Comparison.of(before, records(ddp=1.0, local=1.0, zero1=zero1)).slower() == slower


def test_what_differs_between_the_same_code_is_noise() -> None:
    before = records(ddp=1.0, local=1.0, zero1=1.0)
    comparison = Comparison.of(before, records(ddp=0.95, local=1.01, zero1=1.07))
    assert comparison.noise == pytest.approx(0.05)
    assert comparison.slower() == []


def test_the_package_of_a_folder_is_used() -> None:
    with checkout(str(REPOSITORY)) as folder:
        assert folder == REPOSITORY


def test_the_package_of_a_commit_is_taken_out() -> None:
    with checkout("HEAD") as folder:
        assert (folder / "lightning_shard" / "__init__.py").exists()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_a_package_whose_steps_sleep_is_slower(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "lightning_shard", tmp_path / "lightning_shard")
    engine = tmp_path / "lightning_shard" / "optim" / "sharded_optimizer.py"
    engine.write_text(
        engine.read_text() + "\n\nimport time\n_init = ShardedOptimizer.__init__\n\n\n"
        "def _slow(self, optimizer, *args, **kwargs):\n"
        "    _init(self, optimizer, *args, **kwargs)\n"
        "    optimizer.register_step_pre_hook(lambda *_: time.sleep(1.0))\n\n\n"
        "ShardedOptimizer.__init__ = _slow\n"
    )
    found = time_checkouts((REPOSITORY, tmp_path), "tiny", NAMES, 3, 1)
    ratios = Comparison.of(*found).ratios
    assert ratios["zero1"].median > 5 * ratios["ddp"].median
