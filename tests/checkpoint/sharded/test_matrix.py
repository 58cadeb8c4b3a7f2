"""A checkpoint of any layout and format goes on under any other, as a single device would."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoint.sharded.runs import LAYOUTS, NUM_STEPS, SAVED_AFTER, Model, fit, saving
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")


class Kept(NamedTuple):
    """A layout, and the format in which it saves."""

    layout: str
    format: str = "sharded"

    def __str__(self) -> str:
        return f"{self.layout}-{self.format}"


ALL = [Kept(*one) for one in product(LAYOUTS, ("full", "sharded"))]
QUICK = [
    (Kept("zero3-4"), "zero1-3"),
    (Kept("shard_ddp-2"), "zero3-3"),
    (Kept("hybrid-8"), "copies-4"),
    (Kept("tensor-4"), "pipeline-2"),
    (Kept("pipeline-2"), "tensor-4"),
    (Kept("copies-4"), "hybrid-8"),
    (Kept("zero2-2", "full"), "zero3-4"),
    (Kept("zero1-3"), "shard_ddp-2"),
]
PAIRS = [(before, after) for before in ALL for after in LAYOUTS]


@cache
def single_device() -> Model:
    return fit("auto")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains on a layout, once, and gives its checkpoint."""

    @cache
    def save(kept: Kept) -> Path:
        strategy = LAYOUTS[kept.layout](checkpoint_format=kept.format)
        return saving(strategy, tmp_path_factory.mktemp(str(kept)))

    return save


def check(before: Kept, after: str, saved: Any) -> None:
    expected = single_device()
    path = saved(before)
    assert path.is_dir() == (before.format == "sharded")
    model = fit(LAYOUTS[after](), ckpt_path=path)
    assert len(model.losses) == NUM_STEPS - SAVED_AFTER
    torch.testing.assert_close(model.losses, expected.losses[SAVED_AFTER:], rtol=1e-5, atol=0)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("before", "after"), QUICK, ids=str)
def test_resume(before: Kept, after: str, saved: Any) -> None:
    check(before, after, saved)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [p for p in PAIRS if p not in QUICK], ids=str)
def test_resume_everywhere(before: Kept, after: str, saved: Any) -> None:
    check(before, after, saved)
