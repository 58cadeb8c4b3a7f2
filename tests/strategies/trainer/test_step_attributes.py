"""What steps keep on their module is there on every rank, merged of all microbatches."""

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_shard import ConfigError
from lightning_shard.strategies.trainer.step_attributes import Microbatches, merged
from tests.strategies.parity import ignoring
from tests.strategies.stacks import OfEveryRank, Stack, fit, fit_with, pipeline

pytestmark = ignoring()


class Keeping(Stack):
    """Keeps what the manuals keep: losses, outputs by name, texts, a running sum."""

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []
        self.kept: dict[str, list[Any]] = defaultdict(list)
        self.inputs: list[Tensor] = []
        self.total, self.count = torch.zeros(()), 0
        self.sums = {"loss": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inputs.append(batch[0])
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.losses.append(loss)
        self.kept["logits"].append({"logits": logits.detach(), "first": batch[0][:, 0]})
        self.kept["classes"].extend(str(int(one)) for one in batch[1])
        self.total += loss.detach() * len(batch[1])
        self.count += len(batch[1])
        self.sums["loss"] += loss.item() * len(batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", torch.stack(self.losses).mean(), sync_dist=True)
        self.log("running", self.total / self.count, sync_dist=True)
        self.seen = {
            "losses": torch.stack(self.losses).detach(),
            "logits": torch.cat([one["logits"] for one in self.kept["logits"]]),
            "first": torch.cat([one["first"] for one in self.kept["logits"]]),
            "classes": [int(one) for one in self.kept["classes"]],
            "inputs": torch.cat(self.inputs),
            "count": self.count,
            "total": self.total,
            "sum": self.sums["loss"],
        }


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "zbv"), (3, "1f1b")])
def test_lists_of_a_step_are_filled_on_every_stage(num_ranks: int, schedule: str) -> None:
    """Lists of a step were empty on all stages but the last."""
    alone = fit(Keeping, max_epochs=1)
    ranks = OfEveryRank()
    staged = fit_with(Keeping, ranks, num_ranks, schedule, max_epochs=1)
    assert len(ranks.ranks) == num_ranks
    for seen in ranks.ranks:
        torch.testing.assert_close(seen, alone.model.seen, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        dict(staged.trainer.callback_metrics), dict(alone.trainer.callback_metrics)
    )


class Embedding(Stack):
    """Keeps a value of a block that only the first stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        x = first = self.blocks[0](self.embed(batch[0]))
        for block in self.blocks[1:]:
            x = block(x)
        self.kept.append(first)
        return F.cross_entropy(self.head(x), batch[1])


def test_a_value_of_another_stage_in_a_list_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"adds a value of shape .* to self\.kept"):
        fit(Embedding, pipeline(2, "1f1b"), max_epochs=1)


class OneByOne(Stack):
    """Keeps a text for each sample, and the loss; microbatches are of one sample."""

    def on_train_epoch_start(self) -> None:
        self.texts: list[str] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.texts.extend(f"{float(one):.3f}" for one in batch[0][:, 0])
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen = {
            "texts": [float(one) for one in self.texts],
            "losses": torch.stack(self.losses),
        }


def test_microbatches_of_one_sample_keep_one_text_each_and_one_loss_a_batch() -> None:
    alone, ranks = fit(OneByOne, max_epochs=1), OfEveryRank()

    class Gathered(OneByOne):
        def callbacks(self) -> list[Callback]:
            return [ranks]

    fit(Gathered, pipeline(2, "1f1b", num_microbatches=12), max_epochs=1)
    for seen in ranks.ranks:
        torch.testing.assert_close(seen, alone.model.seen, rtol=1e-5, atol=1e-6)


SIZES, LOSSES = (4, 4, 2), (1.0, 2.0, 4.0)
MEAN = (4 * 1.0 + 4 * 2.0 + 2 * 4.0) / 10
SUM = 4 * 1.0 + 4 * 2.0 + 2 * 4.0


@pytest.mark.parametrize(
    ("start", "values", "expected", "is_certain"),
    [
        (5, (6, 6, 6), 6, True),  # a counter of steps
        (5, (9, 9, 7), 15, True),  # of samples
        (5, (7, 6, 5), 8, False),  # of right answers
        (None, (3, 3, 3), 3, True),
        (True, (False, False, False), False, True),
        (0.1, (0.05, 0.05, 0.05), 0.05, True),  # a learning rate
        (5.0, (6.0, 7.0, 9.0), 5 + MEAN, True),  # the loss, added
        (0.0, LOSSES, MEAN, True),
        (7.0, LOSSES, MEAN, True),  # the last loss
        (5.0, (9.0, 13.0, 13.0), 5 + SUM, True),  # the loss of all samples
        (5.0, (4.6, 4.7, 4.9), 0.9 * 5 + 0.1 * MEAN, False),  # an average kept by hand
        ("a", ("b", "c", "d"), "d", False),
    ],
)
def test_numbers(start: Any, values: Any, expected: Any, is_certain: bool) -> None:
    found = merged(start, values, Microbatches(SIZES, LOSSES))
    assert found.value == (pytest.approx(expected) if type(expected) is float else expected)
    assert type(found.value) is type(expected)
    assert (found.assumed == "") is is_certain


def test_tensors() -> None:
    parts = Microbatches(SIZES, LOSSES)
    zeros = torch.zeros(2)
    found = merged(zeros, [torch.full((2,), one) for one in LOSSES], parts)
    torch.testing.assert_close(found.value, torch.full((2,), MEAN))
    counts = merged(torch.tensor(3), [torch.tensor(4)] * 3, parts)
    assert counts.value == 4


def test_lists_of_one_length_are_merged_by_items() -> None:
    found = merged([0.0, 1.0], [[1.0, one] for one in LOSSES], Microbatches(SIZES, LOSSES))
    assert found.value == [1.0, pytest.approx(MEAN)]


def test_one_sample_in_each_microbatch_is_ambiguous() -> None:
    found = merged(5, (6, 6, 6), Microbatches((1, 1, 1), LOSSES))
    assert (found.value, found.assumed) == (6, "a count of batches")
