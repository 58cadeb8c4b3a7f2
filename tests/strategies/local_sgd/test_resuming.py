"""Local SGD goes on from what another configuration of it has saved."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.local_sgd.local_training import (
    BATCH,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    tiny_data,
    trainer_of,
    weights_of,
)
from tests.strategies.local_sgd.test_consensus import SaveAt
from tests.strategies.parity import ignoring

pytestmark = ignoring(
    "Be aware that when using `ckpt_path`", "You're resuming from a checkpoint that ended before"
)

OVERLAPPED = {"sync_every": 4, "overlap_steps": 2, "mixing": 0.0}
RULES: dict[str, dict[str, Any]] = {
    "average": OVERLAPPED,
    "diloco": OVERLAPPED | {"outer_optimizer": "nesterov"},
    "int8": OVERLAPPED | {"compression": "int8"},
}


def save(file: Path, way: str, step: int = 5) -> None:
    """Save after a step; at the fifth parameters travel."""
    data = TinyData(tiny_data(2 * BATCH * 12))
    trainer_of(2, 5, RULES[way], callbacks=[SaveAt(file, step)]).fit(Tiny(), datamodule=data)


def resumed(file: Path, way: str) -> Weights:
    module, data = Tiny(), TinyData(tiny_data(2 * BATCH * 12))
    trainer_of(2, 9, RULES[way]).fit(module, datamodule=data, ckpt_path=file)
    return weights_of(module)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("before", "after"), [("average", "diloco"), ("diloco", "average"), ("int8", "average")]
)
def test_what_travelled_under_another_rule_was_taken_for_the_model(
    before: str, after: str, tmp_path: Path
) -> None:
    """Taken for values, differences made every parameter almost 0."""
    file, without = tmp_path / "five.ckpt", tmp_path / "without.ckpt"
    save(file, before)
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["lightning_shard"]["local_sgd"]["arriving"] = []
    torch.save(checkpoint, without)
    expected = resumed(without, after)
    sent = {"average": "values", "diloco": "changes", "int8": "changes"}
    message = f"while {sent[before]} of parameters were on .* this run sends {sent[after]}"
    with pytest.warns(UserWarning, match=message):
        got = resumed(file, after)
    assert_same_weights(got, expected, rtol=0, atol=0)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("before", "after", "save_at"),
    [("diloco", "int8", 5), ("diloco", "diloco", 5), ("diloco", "average", 3)],
)
def test_what_travels_is_left_out_only_where_it_cannot_be_read(
    before: str, after: str, save_at: int, tmp_path: Path
) -> None:
    file = tmp_path / "saved.ckpt"
    save(file, before, save_at)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The checkpoint was saved while")
        resumed(file, after)
    state = torch.load(file, weights_only=True)["lightning_shard"]["local_sgd"]
    assert bool(state["arriving"]) == (save_at == 5)
