"""What blocks and steps do beside returning a value: it is as on one device, or refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard import ConfigError
from tests.strategies.parity import ignoring
from tests.strategies.stacks import PIPELINES, Block, Stack, check, fit, pipeline

pytestmark = ignoring()


def refused(style: type[Stack], message: str, schedule: str = "1f1b") -> None:
    with pytest.raises(ConfigError, match=message):
        fit(style, pipeline(2, schedule), max_epochs=1)


# --- was wrong, or an error without need -------------------------------------------------------


class AppendingBlock(Block):
    def forward(self, x: Tensor, sizes: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        sizes.append(x.square().mean())
        return x


class ListOfLosses(Stack):
    """Each block adds its loss to a list, which the copies that ranks called blocks with lost."""

    block = AppendingBlock

    def loss(self, batch: Any) -> Tensor:
        sizes: list[Tensor] = []
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x, sizes)
        return F.cross_entropy(self.head(x), batch[1]) + 0.1 * torch.stack(sizes).mean()


class AskingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(x.dtype).contiguous()
        return super().forward(-x if float(x.detach().mean()) > 1e9 else x)


class AskingBlocks(Stack):
    """Blocks ask for elements of what they are given, which counted as a value that they keep."""

    block = AskingBlock


class BlockOfState(Block):
    def forward(self, state: dict[str, Tensor]) -> None:  # type: ignore[override]
        state["x"] = super().forward(state["x"])


class DictionaryOfState(Stack):
    """The blocks change a dictionary and return nothing."""

    block = BlockOfState

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.embed(x)}
        for block in self.blocks:
            block(state)
        return self.head(state["x"])


class ResidualAround(Stack):
    """What a block is called with is used beside it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        return self.head(x)


class CloningBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class WrittenAround(Stack):
    """What a block was called with is written to; the next one took the old value."""

    block = CloningBlock

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks[:3]:
            added = block(x)
            x *= 0.5
            x += added
        return self.head(self.blocks[3](x))


class CheckpointedAround(Stack):
    """What is used beside a block is needed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x) + 0.5 * x, x, use_reentrant=False)
        return self.head(x)


class WritingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class WrittenArguments(Stack):
    """Blocks write to their argument, which a received leaf did not allow."""

    block = WritingBlock


class LayersInPlace(Stack):
    """Activations of a plain sequence write to what they are given, across stages too."""

    def __init__(self) -> None:
        super().__init__()
        layers = [self.embed, *(block.layer for block in self.blocks)]
        pairs = [one for layer in layers for one in (layer, nn.ReLU(inplace=True))]
        self.blocks = nn.Sequential(*pairs, self.head)
        self.embed = self.head = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class DrawsAfterDropout(Stack):
    """The mask of the loss is that of the input, though other stages skip the dropout between."""

    def loss(self, batch: Any) -> Tensor:
        x = F.dropout(self.embed(batch[0]), 0.5)
        mask = torch.rand(len(x), 1)
        x = 0 * x + mask
        for block in self.blocks:
            x = block(x)
        return (x - mask).abs().max()


class NoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.weight


DrawsAfterDropout.block = NoBlock


class Unfrozen(Stack):
    """Parameters that begin to be trained in between."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        self.requires_grad_(self.current_epoch > 0)
        self.head.requires_grad_(True)


STYLES = [
    ListOfLosses,
    DictionaryOfState,
    ResidualAround,
    WrittenAround,
    CheckpointedAround,
    WrittenArguments,
    AskingBlocks,
    LayersInPlace,
    Unfrozen,
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
@pytest.mark.parametrize("style", STYLES)
def test_values_beside_the_results(style: type[Stack], num_ranks: int, schedule: str) -> None:
    check(style, num_ranks, schedule)


@pytest.mark.parametrize(("num_ranks", "schedule"), PIPELINES)
def test_a_step_draws_the_same_after_a_dropout_of_another_stage(
    num_ranks: int, schedule: str
) -> None:
    staged = fit(DrawsAfterDropout, pipeline(num_ranks, schedule), max_epochs=1)
    assert max(staged.curve.losses) == 0


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch mutes it, but not by thread
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_compiled_blocks_are_skipped_as_they_are_written(schedule: str) -> None:
    class Compiled(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(torch.compile(b, backend="eager") for b in self.blocks)

    check(Compiled, 2, schedule)


# --- was silently without what earlier stages have ---------------------------------------------


class KeepingBlock(Block):
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = x.square().mean()
        return x


class KeptLosses(Stack):
    block = KeepingBlock

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + sum(block.kept for block in self.blocks if block.kept is not None)


class RoutingBlock(KeepingBlock):
    """Asks for elements, so that it cannot be skipped by running it on stand-ins."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).nonzero().flatten()
        return super().forward(x.index_add(0, chosen, x[chosen]))


class KeptLossesOfRouters(KeptLosses):
    block = RoutingBlock


def _collect(block: nn.Module, args: Any, output: Tensor) -> None:
    block.collected.append(output)


class Collected(Stack):
    """A hook collects every block's output in a list, as of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for block in self.blocks:
            object.__setattr__(block, "collected", self.collected)
            block.register_forward_hook(_collect)

    def loss(self, batch: Any) -> Tensor:
        self.collected.clear()
        return super().loss(batch) + sum(x.square().mean() for x in self.collected)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "schedule", ["1f1b", "zbv", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("style", [KeptLosses, Collected])
def test_losses_that_blocks_of_other_stages_keep_are_refused(
    style: type[Stack], schedule: str
) -> None:
    """Losses that blocks of other stages keep were left out."""
    refused(style, "the step's result holds a value .* on another stage", schedule)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_losses_that_blocks_keep_which_cannot_be_skipped_are_refused(schedule: str) -> None:
    """Losses that blocks keep which cannot be skipped were left out."""
    refused(KeptLossesOfRouters, "'blocks.0' keeps tensors that require gradients", schedule)


class PenaltyOfList(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.listed = list(self.parameters())

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(param.square().sum() for param in self.listed)


class PenaltyOfGroups(Stack):
    def loss(self, batch: Any) -> Tensor:
        (optimizer,) = self.trainer.optimizers
        params = optimizer.param_groups[0]["params"]
        return super().loss(batch) + sum(param.square().sum() for param in params)


class PenaltyOfTrained(Stack):
    """Of what is trained, which grows in the middle of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        trained = [param for param in self.parameters() if param.requires_grad]
        return super().loss(batch) + 0.01 * sum(param.square().sum() for param in trained)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.embed.requires_grad_(self.global_step > 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:A step uses .* parameters outside of their stage")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_is_trained_later_is_lent_from_then_on(schedule: str) -> None:
    """What another stage borrows was asked for in the first batch alone: an error ended the run."""
    check(PenaltyOfTrained, 2, schedule)


class Own(nn.Parameter):
    """A parameter of a class of the user's."""


class PenaltyOfOwnClass(PenaltyOfList):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.extra = Own(torch.ones(3))
        self.listed = list(self.parameters())


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:A step uses .* parameters outside of their stage")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("style", [PenaltyOfList, PenaltyOfGroups])
def test_penalties_of_kept_parameters_are_those_of_one_device(
    style: type[Stack], schedule: str
) -> None:
    """Later they were refused; their modules' stand-ins stand for them, too."""
    check(style, 2, schedule)


@pytest.mark.filterwarnings("ignore:A step uses .* parameters outside of their stage")
def test_penalties_of_absent_parameters_are_refused() -> None:
    """Penalties of absent parameters were zero."""
    message = "The loss is computed from the parameter '.*' outside of its module"
    refused(PenaltyOfOwnClass, message)


@pytest.mark.filterwarnings("ignore:A step uses 2 parameters outside of their stage")
def test_an_out_argument_is_that_of_one_device() -> None:
    """Values of another stage went into an out argument."""

    class Out(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                known = torch.empty(len(x), 8)
                torch.add(self.embed(x), 1, out=known)
            x = known
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    alone, staged = fit(Out), fit(Out, pipeline(2, "1f1b"))
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)


def test_a_network_that_is_compiled_as_one() -> None:
    class Full(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.compile(backend="eager")

    refused(Full, "'blocks' is compiled as a whole.*block.compile")


class WrittenThroughView(Stack):
    block = CloningBlock

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        half = x[:, :4]
        for block in self.blocks[:3]:
            added = block(x)
            half *= 0.5
            x = x + added
            half = x[:, :4]
        return self.head(self.blocks[3](x))


def test_writes_through_an_earlier_view_are_refused() -> None:
    """Writes through an earlier view were lost."""
    refused(WrittenThroughView, "written to afterwards, through a view")
