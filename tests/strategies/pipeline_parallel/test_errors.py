"""What a pipeline refuses, and what the message says to do; nothing is silently wrong."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ConfigError, PipelineParallelStrategy
from tests.strategies.parity import ignoring
from tests.strategies.stacks import (
    ALL_PIPELINES,
    BATCH,
    PIPELINES,
    WIDTH,
    Block,
    ByHand,
    Stack,
    fit,
    pipeline,
    samples,
)

pytestmark = ignoring()


def refused(style: type[Stack], message: str, *args: Any, **options: Any) -> None:
    """Fit on two ranks, and look for the message."""
    num_ranks, schedule = args or (2, "1f1b")
    with pytest.raises(ConfigError, match=message):
        fit(style, pipeline(num_ranks, schedule, **options), max_epochs=1)


# --- numbers and names -------------------------------------------------------------------------


def test_fewer_blocks_than_stages() -> None:
    refused(
        Stack,
        "^Use fewer ranks.*'blocks' of Stack has 4 blocks, which cannot be cut into 6",
        3,
        "zbv",
    )


def test_a_path_that_names_no_module() -> None:
    refused(Stack, "blocks='block' names no module of Stack.*'blocks'", blocks="block")


def test_a_path_that_names_no_list() -> None:
    refused(Stack, "blocks='head' is a Linear of 0 modules; expected a Mod", blocks="head")


def test_two_lists_of_blocks() -> None:
    class TwoLists(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.ModuleList(Block() for _ in range(4))

    refused(TwoLists, "^Name the list to cut, such as blocks=.*several lists of repeated blocks")


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "message"),
    [
        ("dual_pipe_v", 3, "num_microbatches is 3 .*at least one per stage, 4"),
        ("interleaved_1f1b", 5, "num_microbatches is 5 .*in equal rounds.*to 4 or 6"),
        ("interleaved_zero_bubble", 7, "num_microbatches is 7 .*in equal rounds"),
    ],
)
def test_a_number_of_microbatches_that_the_schedule_does_not_allow(
    schedule: str, num_microbatches: int, message: str
) -> None:
    refused(Stack, message, 2, schedule, num_microbatches=num_microbatches)


class LastOfThree(Stack):
    """The last batch of an epoch has three samples."""

    def dataset(self) -> Any:
        return TensorDataset(*samples(BATCH + 3))


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the")
def test_a_batch_of_fewer_samples_than_a_schedule_allows() -> None:
    refused(LastOfThree, "num_microbatches is 3 with schedule='dual_pipe_v'.*Set", 2, "dual_pipe_v")


@pytest.mark.filterwarnings("ignore:.* microbatches are fewer than the")
def test_a_batch_of_fewer_samples_than_microbatches_has_one_part_for_each() -> None:
    alone, staged = fit(LastOfThree), fit(LastOfThree, pipeline(2, "1f1b", num_microbatches=8))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("split", [[0], [4], [9]])
def test_a_split_that_leaves_a_stage_empty(split: list[int]) -> None:
    refused(Stack, "split", split=split)


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="num_microbatches must be a whole number of at least 1"):
        PipelineParallelStrategy(num_microbatches=0)
    with pytest.raises(ConfigError, match="schedule must be a string that is one of gpipe, 1f1b"):
        PipelineParallelStrategy(schedule="2f2b")


def test_fewer_microbatches_than_stages_warn_of_the_bubble() -> None:
    with pytest.warns(UserWarning, match="3 microbatches are fewer than the 4 stages: .* 25%.*to"):
        fit(Stack, pipeline(2, "zbv", num_microbatches=3), max_epochs=1)


def test_as_many_microbatches_as_stages_do_not_warn() -> None:
    fit(Stack, pipeline(2, "zbv", num_microbatches=4), max_epochs=1)


# --- the step ----------------------------------------------------------------------------------


class OfIterator(Stack):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return self.loss(next(dataloader_iter)[0])


class Twice(Stack):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self(batch[0].flip(0)).square().mean()


class TwiceInBlock(Stack):
    """A block is called again after all others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in [*self.blocks, self.blocks[3]]:
            x = block(x)
        return self.head(x)


class OutOfOrder(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index in (0, 2, 1, 3):
            x = self.blocks[index](x)
        return self.head(x)


class WithoutTheLast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)


class WithoutNetwork(Stack):
    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.head(self.embed(batch[0])), batch[1])


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("style", "message"),
    [
        (ByHand, "ByHand optimizes by hand.*strategy='zero3'"),
        (OfIterator, "OfIterator.training_step takes the loader's iterator"),
        (Twice, "concatenate.*Stage 1: the step calls the block 'blocks.0' after .*'blocks.2' to"),
        (OutOfOrder, "Stage 1: the step calls the block 'blocks.1' after .*once, in order"),
        (WithoutTheLast, "'blocks.2' of stage 1, expected it to call the network once"),
        (WithoutNetwork, "without calling the block 'blocks.2'"),
    ],
)
def test_steps_that_are_no_pipeline(style: type[Stack], message: str) -> None:
    refused(style, message)


def test_the_first_block_of_a_stage_is_called_once() -> None:
    """Another one may be called again, as long as its stage goes on."""
    refused(TwiceInBlock, "Stage 3: the step calls the block 'blocks.3' after", 2, "zbv")
    alone, staged = fit(TwiceInBlock), fit(TwiceInBlock, pipeline(2, "1f1b"))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


# --- values of other stages --------------------------------------------------------------------


class UsesABlockLater(Stack):
    """A skip from an early block to the head."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](self.embed(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + first)


def test_a_blocks_result_is_used_on_another_stage() -> None:
    message = "^Let the blocks take and return .*zero3.*Stage 1: the step's result holds a value "
    refused(UsesABlockLater, message)


# --- what the blocks are called with -----------------------------------------------------------


class Widths(Block):
    """Returns as many of its features as it is told."""

    kept = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : self.kept]


@pytest.mark.parametrize("narrow", [0, 1, 2])
@pytest.mark.parametrize(("num_ranks", "schedule"), ALL_PIPELINES[:3])
def test_a_block_whose_output_does_not_fit_the_next_ones_input(
    narrow: int, num_ranks: int, schedule: str
) -> None:
    class Misfit(Stack):
        block = Widths

        def __init__(self) -> None:
            super().__init__()
            self.blocks[narrow].kept = WIDTH - 1

    message = f"block 'blocks.{narrow + 1}' on stage .* called with tensors of shape .*, 7"
    with pytest.raises(RuntimeError, match=message):
        fit(Misfit, pipeline(num_ranks, schedule))


class WritesOutItsBatch(Stack):
    """Has a row for each sample of a batch, of which it has been told the number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([torch.zeros(BATCH, 1), x[:, 1:]], 1))


def test_a_batch_size_that_the_module_writes_out_raises_an_error_with_advice() -> None:
    """A batch size that the module writes out raised an error without advice."""
    with pytest.raises(RuntimeError, match="a microbatch of 3 of the batch's 12 samples"):
        fit(WritesOutItsBatch, pipeline(2, "1f1b", num_microbatches=4), max_epochs=1)


class ShapesOfRandom(Stack):
    """The same batch has activations of other lengths each time."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.calls = iter(range(1, 99))  # a number would be put back after each microbatch

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.repeat(1 + next(self.calls) // 9, 1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)[: BATCH // 4]


def test_activations_whose_shapes_do_not_follow_from_the_batch() -> None:
    refused(ShapesOfRandom, "expected .* as for the last batch of these shapes")


class OtherArguments(Stack):
    """From the second batch on the blocks take one more value of an earlier stage."""

    class block(Block):  # noqa: D106, N801
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            return super().forward(x) if other is None else super().forward(x) + other

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = first = self.embed(batch[0])
        for block in self.blocks:
            x = block(x, first if batch_idx else None)
        return F.cross_entropy(self.head(x), batch[1])


def test_blocks_that_take_other_arguments_in_a_later_step() -> None:
    refused(OtherArguments, "blocks.2.*(as in the first batch|as on the next stage)")


# --- ranks -------------------------------------------------------------------------------------


def test_ranks_that_are_given_different_batches() -> None:
    class Shuffled(Stack):
        def train_dataloader(self) -> Any:
            inputs, classes = samples(seed=1 + self.trainer.strategy.mesh_rank)
            return DataLoader(TensorDataset(inputs, classes), BATCH)

    refused(Shuffled, "must be given the same")


def leftovers(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if type(one).__module__.startswith("lightning_shard")]


@pytest.mark.parametrize("style", [Twice, ByHand, UsesABlockLater, WithoutTheLast])
def test_a_refused_module_is_what_it_was(style: type[Stack]) -> None:
    made: list[Stack] = []

    class Kept(style):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with pytest.raises(ConfigError):
        fit(Kept, pipeline(2, "1f1b"))
    (model,) = made
    assert {type(block) for block in model.blocks} == {Block}
    assert not leftovers(model)
    assert "log" not in vars(model)


class Stops(Exception):  # noqa: N818
    """Stops a fit."""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("place", ["embed", "blocks.0", "blocks.2", "blocks.3", "head"])
def test_an_error_in_any_stage_ends_every_rank(place: str, num_ranks: int, schedule: str) -> None:
    class Failing(Stack):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.get_submodule(place).register_forward_hook(raising)

    with pytest.raises(Stops, match="here"):
        fit(Failing, pipeline(num_ranks, schedule))


def raising(module: nn.Module, *_: Any) -> None:
    weight = next(module.parameters())
    if type(weight) is nn.Parameter:  # its own stage
        raise Stops("here")
