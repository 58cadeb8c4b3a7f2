"""Steps run within the engine's, and what surrounds them is outermost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_shard.strategies.dimensions.step_runner import PlainRunner, StepKind, WrappedRunner


class Told:
    """Notes what is entered and left."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self.lines.append(f"enter {name}")
        yield
        self.lines.append(f"leave {name}")


@pytest.mark.parametrize(("kind", "apart"), [("training", ["own data"]), ("validation", [])])
def test_a_step_runs_within_the_engines(kind: StepKind, apart: list[str]) -> None:
    told = Told()
    plain = PlainRunner(lambda: told.inside("engine"), lambda: told.inside("own data"))
    runner = WrappedRunner(plain, lambda: told.inside("layers"), lambda result: result * 2)

    def step(*args: Any, **kwargs: Any) -> int:
        told.lines.append(f"{args} {kwargs}")
        return 21

    assert runner.run(kind, step, ("batch", 0), {"dataloader_idx": 1}) == 42
    around = ["layers", *apart, "engine"]
    assert told.lines == [
        *(f"enter {one}" for one in around),
        "('batch', 0) {'dataloader_idx': 1}",
        *(f"leave {one}" for one in reversed(around)),
    ]
