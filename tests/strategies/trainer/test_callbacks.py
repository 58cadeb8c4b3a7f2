"""Model summaries that are made while ranks have parts of the parameters."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import nn

from lightning_shard.strategies.trainer.callbacks import counted_full
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice()


def counts(model: Any) -> tuple[int, int, list[int]]:
    summary = ModelSummary(model, max_depth=-1)
    return summary.total_parameters, summary.trainable_parameters, summary.param_nums


@pytest.mark.parametrize("layout", ["tensor-4", "pipeline-2"])
def test_a_summary_in_a_hook_counts_full_parameters(layout: str) -> None:
    """A summary in a hook counted parts."""
    seen = {}

    class Summarised(Model):
        def on_fit_start(self) -> None:
            seen["before", self.trainer.strategy.mesh_rank] = counts(self)

        def on_train_batch_end(self, *_: Any) -> None:
            seen["after", self.trainer.strategy.mesh_rank] = counts(self)

    torch.manual_seed(0)
    model = fit(LAYOUTS[layout](), Summarised(), max_steps=1)
    assert len(seen) == 2 * int(layout[-1])
    assert set(map(repr, seen.values())) == {repr(counts(Model()))}
    assert counts(model) == counts(Model())


def test_parts_are_counted_full_only_inside() -> None:
    layer = nn.Linear(2, 3)
    model = Model()
    model.head = layer
    own = counts(model)
    with counted_full({layer.weight: torch.Size((3, 20)), layer.bias: torch.Size((3,))}):
        assert counts(model)[0] == own[0] + 3 * 18
    assert counts(model) == own
