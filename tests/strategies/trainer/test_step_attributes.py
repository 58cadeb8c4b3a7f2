"""What steps keep on their module is there on every rank, merged of all microbatches."""

from collections import defaultdict
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.strategies.trainer.step_attributes import Microbatches, merged
from tests.strategies.parity import ignoring
from tests.strategies.stacks import (
    BATCH,
    WIDTH,
    Block,
    OfEveryRank,
    Stack,
    fit,
    fit_with,
    pipeline,
    trainer_of,
)

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


class Last(Stack):
    """Keeps the last value of a block that only the first stage has, in the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def loss(self, batch: Any) -> Tensor:
        x = self.last = self.blocks[0](self.embed(batch[0]))
        for block in self.blocks[1:]:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1])


@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_a_value_of_another_stage_that_is_set_is_told_of(num_microbatches: int) -> None:
    """It stayed as it was on every rank, without a word."""
    with pytest.warns(UserWarning, match=r"self\.last to a value .* stays as it was"):
        fit(Last, pipeline(2, "1f1b", num_microbatches=num_microbatches), max_epochs=1)


class Unsendable(Stack):
    """Keeps in a list what is of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        self.kept.append(lambda: None)
        return super().loss(batch)


def test_what_cannot_be_sent_to_other_ranks_is_refused() -> None:
    """It ended in pickle's own error."""
    with pytest.raises(ConfigError, match=r"keeps in a list cannot be sent to other ranks"):
        fit(Unsendable, pipeline(2, "1f1b"), max_epochs=1)


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


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_items_that_compare_by_element_are_merged(kind: type) -> None:
    """Two arrays, or two tensors in a pair, raised an error of ambiguous values."""
    tensors = [torch.tensor([one, 1.0]) for one in LOSSES]
    items: Any = [[kind({"a": 0}), [one.numpy(), (one, "a")]] for one in tensors]
    found = merged([], items, Microbatches(SIZES, LOSSES))
    assert found.value[0] == kind({"a": 0})
    assert found.value[1][0] is items[-1][1][0]
    assert found.assumed == "the value after the last microbatch"


class Recurrent(Stack):
    """Has a stem that lists its own weights, of which the last stage borrows one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        x = self.stem(self.embed(batch[0])[:, None])[0][:, 0]
        for block in self.blocks:
            x = block(x)
        penalty = sum(one.pow(2).sum() for one in self.stem.parameters())
        return F.cross_entropy(self.head(x), batch[1]) + 1e-3 * penalty


@pytest.mark.filterwarnings("ignore:1 microbatches are fewer than the 2 stages")
@pytest.mark.filterwarnings("ignore:A step uses 4 parameters outside of their stage")
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_recurrent_layer_keeps_its_list_of_weights(num_microbatches: int) -> None:
    """The weights that a stage borrows were compared as values that the step had changed."""
    alone = fit(Recurrent, max_epochs=1)
    strategy = pipeline(2, "1f1b", num_microbatches=num_microbatches)
    staged = fit(Recurrent, strategy, max_epochs=1)
    torch.testing.assert_close(staged.model.state_dict(), alone.model.state_dict())


def test_one_sample_in_each_microbatch_is_ambiguous() -> None:
    found = merged(5, (6, 6, 6), Microbatches((1, 1, 1), LOSSES))
    assert (found.value, found.assumed) == (6, "a count of batches")


class OnParts(Stack):
    """Counts, collects and switches on modules of every stage, from a batch on."""

    first_batch: ClassVar[int] = 0
    before_network: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        parts = (self, self.embed, self.blocks, self.blocks[0], self.blocks[0].layer)
        self.parts = (*parts, self.blocks[3], self.head)
        for part in self.parts:
            part.calls = part.samples = 0
            part.items, part.table, part.mode, part.total = [], {"n": 0}, "", torch.zeros(2)

    def count(self, batch: Any, batch_idx: int) -> None:
        for part in self.parts if batch_idx >= self.first_batch else ():
            part.calls += 1
            part.samples += len(batch[0])
            part.items.append(float(batch[0].sum()) * 0)
            part.table["n"] += len(batch[0])
            part.table.setdefault("classes", []).extend(str(int(one)) for one in batch[1])
            part.mode = f"batch {batch_idx}"
            part.total += 1
            part.first = getattr(part, "first", batch_idx)
        self.blocks[0].layer.train(batch_idx % 2 == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.before_network:
            self.count(batch, batch_idx)
        loss = self.loss(batch)
        if not self.before_network:
            self.count(batch, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.training_step(batch, batch_idx)
        return batch[0]

    @property
    def seen(self) -> list[Any]:
        names = ("calls", "samples", "items", "table", "mode", "first", "training")
        found = [{name: getattr(part, name) for name in names} for part in self.parts]
        return [
            {**one, "total": part.total.tolist()}
            for one, part in zip(found, self.parts, strict=True)
        ]


class OfEveryLoop(OfEveryRank):
    """Gathers at the end of any loop."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_end(trainer, pl_module)
        self.ranks = self.ranks or [pl_module.seen]

    on_test_end = on_predict_end = on_validation_end


LATER_AND_BEFORE = {"first_batch": 3, "before_network": True}


@pytest.mark.parametrize(
    ("loop", "num_ranks", "options"),
    [
        ("fit", 2, {"first_batch": 3}),
        ("validate", 2, {}),
        *(
            pytest.param(loop, num_ranks, options, marks=pytest.mark.slow)
            for loop in ("fit", "validate", "test", "predict")
            for num_ranks, options in ((3, {}), (2, LATER_AND_BEFORE))
        ),
    ],
)
def test_attributes_of_every_module_are_one_devices_on_every_stage(
    loop: str, num_ranks: int, options: dict[str, Any]
) -> None:
    """Those of submodules were changed on the last stage alone, once per microbatch."""
    style = type("Options", (OnParts,), options)

    def run(strategy: Any, name: str) -> list[Any]:
        torch.manual_seed(0)
        model, ranks = style(), OfEveryLoop()
        trainer = trainer_of(strategy, callbacks=[ranks], max_epochs=1)
        if name == "fit":
            trainer.fit(model)
        else:
            getattr(trainer, name)(model, model.train_dataloader())
        return ranks.ranks or [model.seen]

    (alone,) = run("auto", loop)
    staged = run(pipeline(num_ranks, "1f1b", num_microbatches=num_ranks), loop)
    assert len(staged) == num_ranks
    for seen in staged:
        for part, expected in zip(seen, alone, strict=True):
            for name, value in part.items():
                assert (name, value) == (name, expected[name])


class Counted(Block):
    """Counts its own calls and keeps their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes, self.uses = 0, [], 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        return super().forward(x)


class CountsInBlocks(Stack):
    """Its blocks count their calls, and its step their uses."""

    block = Counted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for block in self.blocks:
            block.uses += 1
        return loss

    @property
    def seen(self) -> list[Any]:
        return [(block.calls, block.sizes, block.uses) for block in self.blocks]


def test_counters_of_a_forward_are_its_stages_and_those_of_a_step_every_ranks() -> None:
    """A counter of the step's counted microbatches on the last stage, and nothing on others."""
    ranks = OfEveryRank()
    fit(CountsInBlocks, pipeline(2, "1f1b", num_microbatches=2), [ranks], max_epochs=1)
    for rank, seen in enumerate(ranks.ranks):
        for calls, sizes, uses in seen[2 * rank : 2 * rank + 2]:
            assert (calls, sizes, uses) == (10, [6] * 10, 5)
        assert [uses for *_, uses in seen] == [5] * 4


class Queue(nn.Linear):
    """A head that keeps its inputs in a queue, at a place that it counts itself."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.register_buffer("queue", torch.zeros(BATCH * 8, WIDTH), persistent=False)
        self.place = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.queue[self.place : self.place + len(x)] = x.detach()
            self.place += len(x)
        return super().forward(x)


class Queued(Stack):
    """Has such a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Queue()

    def on_train_epoch_end(self) -> None:
        self.seen = (self.head.place, self.head.queue.detach().clone())


@pytest.mark.filterwarnings("ignore:A training step changes buffers:UserWarning")
def test_the_place_in_a_queue_goes_with_the_queue() -> None:
    alone, ranks = fit(Queued, max_epochs=1), OfEveryRank()
    fit_with(Queued, ranks, 2, "1f1b", max_epochs=1)
    torch.testing.assert_close(ranks.ranks[-1], alone.model.seen, rtol=1e-4, atol=1e-5)
