"""How blocks are called, what goes in and what comes out: stage 3 must see backward coming."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.errors import ConfigError
from tests.data_parallel.test_training import (
    NUM_RANKS,
    Block,
    Case,
    Loss,
    Net,
    Session,
    accumulate,
    adam,
    bare_backward,
    batches_marked_for_rank_one,
    check,
    from_leaf_input,
    mean_square,
    net_that_calls,
    two_backwards,
    two_backwards_of_one_graph,
    weighted_by_gradient,
    zero_in_place,
)

pytestmark = pytest.mark.each_value


@dataclass
class Output:
    hidden: Tensor
    source: Tensor


class Box:
    """Not a container that anybody knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class OutputBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x), x.detach())


class DictBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return {"hidden": super().forward(x), "more": [1, None, "text"]}


class TupleBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return (super().forward(x), x.mean())


class BoxBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class BoxBesideTensorBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return x.detach(), Box(super().forward(x))


class BoxedInputBlock(Block):
    def forward(self, box: Any) -> Tensor:
        return super().forward(box.value)


class KeywordBlock(Block):
    def forward(self, *, x: Tensor) -> Tensor:
        return super().forward(x)


class WeightNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class SpectralNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class LoraBlock(Block):
    """A frozen base and a trainable adapter: the base is needed after the adapter's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down_projection = nn.Linear(8, 2, bias=False)
        self.up_projection = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up_projection(self.down_projection(x))


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)


class Looped(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class OneBlockThreeTimes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()] * 3)


class Siamese(Net):
    def forward(self, x: Tensor) -> Tensor:
        left, right = self.embed(x), self.embed(2 * x)
        for block in self.blocks:
            left, right = block(left), block(right)
        return self.head(left - right)


class CheckpointedWhole(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Edited(Net):
    """What a block returns is changed in place before the next one gets it."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x).mul_(0.5)


class Dense(Net):
    """Every block gets the mean of all results before it."""

    def forward(self, x: Tensor) -> Tensor:
        results = [self.embed(x)]
        for block in self.blocks:
            results.append(block(torch.stack(results).mean(0)))
        return self.head((results[-1] + results[1]) / 2)


class Within(Net):
    """The last block is called in the forward of the first."""

    def __init__(self) -> None:
        super().__init__()
        first, _, last = self.blocks
        first.norm.register_forward_hook(lambda _, __, result: last(result))


class Caught(Net):
    """A block's forward fails, and the model goes on without it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        first, second, third = self.blocks
        x = first(x)
        try:
            second(x[:, :5])
        except RuntimeError:
            x = second(third(x))
        return self.head(x)


class Sums(Net):
    """Returns the sum of what each block makes."""

    def forward(self, x: Tensor) -> Tensor:
        x, results = self.embed(x), []
        for block in self.blocks:
            x = block(x)
            results.append(x)
        self.results = results
        return self.head(x)


def weighted_by_each_gradient(model: nn.Module, batch: Tensor) -> Tensor:
    """Backward enters at each block by itself, and ends before the first, within and behind."""
    out = model(batch)
    results = model.results
    inner = model.blocks[1].up.weight
    squares = [result.square().sum() for result in (*results, out)]
    by_sample = [
        torch.autograd.grad(squares[1], results[0], retain_graph=True)[0],
        torch.autograd.grad(squares[3], results[1], retain_graph=True)[0],
    ]
    summed = [
        torch.autograd.grad(squares[1], inner, retain_graph=True)[0],
        torch.autograd.grad(squares[0], model.embed.weight, retain_graph=True)[0],
    ]
    weights = torch.stack([torch.tanh(grad.norm(dim=1)) for grad in by_sample]).sum(0)
    shown = sum(grad.sum() for grad in summed) / len(batch)  # as good as the gradients are
    return (out.square().sum(1) * weights).mean() + 0.1 * results[1].mean() + 0.01 * shown


class SharedSubmodule(Net):
    """A module inside one block that is also called outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm = self.blocks[1].norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_norm(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


CASES = {
    "boxed_input": Case(model=net_that_calls(lambda b, x: b(Box(x)), BoxedInputBlock)),
    "boxed_output": Case(model=net_that_calls(lambda b, x: b(x).value, BoxBlock)),
    "boxed_output_beside_tensor": Case(
        model=net_that_calls(lambda b, x: b(x)[1].value, BoxBesideTensorBlock)
    ),
    "checkpointed": Case(model=net_that_calls(checkpointed(use_reentrant=False))),
    "checkpointed_reentrant": Case(model=net_that_calls(checkpointed(use_reentrant=True))),
    "caught": Case(model=Caught),
    "checkpointed_whole": Case(model=CheckpointedWhole),
    "dataclass": Case(model=net_that_calls(lambda b, x: b(x).hidden, OutputBlock)),
    "dense": Case(model=Dense),
    "dict": Case(model=net_that_calls(lambda b, x: b(x)["hidden"], DictBlock)),
    "edited": Case(model=Edited),
    "each_gradient": Case(model=Sums, loss=weighted_by_each_gradient),
    "keywords": Case(model=net_that_calls(lambda b, x: b(x=x), KeywordBlock)),
    "leaf_input": Case(model=Net, loss=from_leaf_input),
    "leaf_input_before_weight_norm": Case(
        model=net_that_calls(lambda b, x: b(x), WeightNormBlock), loss=from_leaf_input
    ),
    "looped": Case(model=Looped),
    "lora": Case(model=net_that_calls(lambda b, x: b(x), LoraBlock)),
    "one_block_three_times": Case(model=OneBlockThreeTimes),
    "shared_submodule": Case(model=SharedSubmodule),
    "siamese": Case(model=Siamese),
    "siamese_weighted_by_gradient": Case(model=Siamese, loss=weighted_by_gradient),
    "spectral_norm": Case(model=net_that_calls(lambda b, x: b(x), SpectralNormBlock)),
    "tuple": Case(model=net_that_calls(lambda b, x: b(x)[0], TupleBlock)),
    "twice": Case(model=Twice),
    "within": Case(model=Within),
}


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("bucket_mb", [1e-4, 25], ids=["unit_each", "one_unit"])
def test_stage_3(name: str, num_ranks: int, bucket_mb: float) -> None:
    check(CASES[name], 3, num_ranks, bucket_mb)


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", range(3))
def test_other_stages(name: str, stage: int) -> None:
    check(CASES[name], stage, num_ranks=2)


class ReentrantShared(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("stage", range(4))
def test_a_block_in_two_reentrant_checkpoints(stage: int) -> None:
    """It was refused under the stages 0 and 1, also in the second step of a run."""
    check(Case(model=ReentrantShared), stage, num_ranks=2)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_two_reentrant_checkpoints_add_up_where_one_is_there(stage: int) -> None:
    """Where `.grad` had been set to zero, and not to None, the second took the first's place."""
    check(Case(model=ReentrantShared, update=zero_in_place), stage, num_ranks=2)


class ReentrantSharedLater(ReentrantShared):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        blocks = [*self.blocks, *(self.blocks[-1:] if self.num_calls > 2 else ())]
        x = self.embed(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def turned(called: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> type[Net]:
    """Return a Net that calls its last block twice later, in place of the one before it."""

    class Turned(ReentrantShared):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            first, second, last = self.blocks
            x = self.embed(x)
            for block in (first, last if self.num_calls > 2 else second, last):
                x = checkpoint(called(block), x, use_reentrant=True)
            return self.head(x)

    return Turned


class ReentrantThawed(ReentrantShared):
    """The last block is called twice, and trained from the third step on."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.blocks[-1].requires_grad_(self.num_calls > 2)
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[-1]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class ReentrantTied(net_that_calls(checkpointed(use_reentrant=True))):  # type: ignore[misc]
    """Blocks have one weight in common, which is alone in its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = self.blocks[2].up.weight
        self.blocks[0].up.weight = self.blocks[1].up.weight = self.shared


class ReentrantBesideItself(net_that_calls(checkpointed(use_reentrant=True))):  # type: ignore[misc]
    """A block is called within a checkpoint, and outside."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[-1](super().forward(x).repeat(1, 3)[:, :8]))


class ReentrantPartly(ReentrantShared):
    """The last block is called once more by the rank that has marked samples."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 3] > 0.5
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        again = partial(checkpoint, self.blocks[-1], x[mask], use_reentrant=True)
        return self.head(add_where(mask, x, again))


class InnerBackward(torch.autograd.Function):
    """Calls a block again in backward, as torch's reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block, ctx.x = block, x.detach()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            ctx.block(x).backward(grad)
        return None, x.grad


class OwnFunctionLater(Net):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.embed(x)
        for block in (*self.blocks, *(self.blocks[-1:] if self.num_calls > 2 else ())):
            x = InnerBackward.apply(block, x)
        return self.head(x)


class OwnCheckpoints(net_that_calls(InnerBackward.apply)):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(2 * x)


class ReentrantToTheEnd(Net):
    """The first gradient comes in a backward within the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for module in (*self.blocks, *self.blocks, self.head):
            x = checkpoint(module, x, use_reentrant=True)
        return x


def twice(model: nn.Module, batch: Tensor) -> Tensor:
    """Call the whole model twice."""
    return mean_square(model, batch) + 0.1 * (model(batch) - 0.9).square().mean()


def in_pieces(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    """Run a backward in two pieces, in each of which the blocks have a part."""
    with session.step():
        middle = session.model(batch)
        cut = middle.detach().requires_grad_()
        value = loss(session.model, cut.repeat(1, 2)[:, :4])
    session.optimizer.zero_grad()
    with session.engine.backward() if session.engine else nullcontext():
        value.backward()
        middle.backward(cut.grad)
    session.optimizer.step()
    return value


Reentrant = net_that_calls(checkpointed(use_reentrant=True))
TWO_ARRIVALS = {
    "model_twice": Case(model=Reentrant, loss=twice),
    "block_twice_later": Case(model=ReentrantSharedLater),
    "module_later": Case(model=turned(lambda block: block)),
    "method_later": Case(model=turned(lambda block: block.forward)),
    "partial_later": Case(model=turned(lambda block: partial(block.__call__))),
    "block_twice_thawed": Case(model=ReentrantThawed),
    "tied": Case(model=ReentrantTied),
    "also_outside": Case(model=ReentrantBesideItself),
    "on_one_rank": Case(model=ReentrantPartly, data=batches_marked_for_rank_one),
    "own_function": Case(model=OwnCheckpoints),
    "in_pieces": Case(model=Net, update=in_pieces),
    "accumulated": Case(model=Reentrant, loss=twice, update=accumulate),
    "two_backwards": Case(model=Reentrant, loss=twice, update=two_backwards),
    "one_graph": Case(model=Reentrant, update=two_backwards_of_one_graph),
    "bare_backward": Case(model=Reentrant, loss=twice, update=bare_backward),
    "bare_from_inside": Case(model=ReentrantToTheEnd, loss=twice, update=bare_backward),
}


@pytest.mark.parametrize("stage", [0, 1])
def test_an_own_function_that_calls_a_block_again_later_is_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"blocks\.2\..* arrived again.*use_reentrant=False"):
        check(Case(model=OwnFunctionLater), stage, num_ranks=2)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("name", TWO_ARRIVALS)
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_come_twice_in_one_backward(name: str, stage: int) -> None:
    """Stages 0 and 1 refused them where the parameter's bucket was complete at the first."""
    check(TWO_ARRIVALS[name], stage, num_ranks=2)


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("name", [name for name in TWO_ARRIVALS if name != "on_one_rank"])
@pytest.mark.parametrize("stage", [2, 3])
def test_stages_that_add_up_in_shards_take_gradients_that_come_twice(name: str, stage: int) -> None:
    check(TWO_ARRIVALS[name], stage, num_ranks=2)


def test_gradients_that_come_twice_on_one_rank_alone_are_refused_by_stage_2() -> None:
    """That rank began one reduction more than the others, and all waited for ever."""
    with pytest.raises(ConfigError, match=r"Rank 1: .*blocks\.2.* arrived again .*not on every"):
        check(TWO_ARRIVALS["on_one_rank"], 2, num_ranks=2)


@pytest.mark.parametrize("name", ["model_twice", "block_twice_thawed", "on_one_rank"])
@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("bucket_mb", [1e-5, 25])
def test_gradients_that_come_twice_on_four_ranks(
    name: str, num_copies: int, bucket_mb: float
) -> None:
    check(TWO_ARRIVALS[name], 1, 4, bucket_mb, num_copies)


class AuxiliaryBlock(Block):
    """Leaves a loss on itself, as routers of mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.auxiliary = self.up(x).tanh().square().mean()
        return out


def with_auxiliary_losses(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(model, batch) + 0.1 * sum(block.auxiliary for block in model.blocks)


@pytest.mark.parametrize("stage", range(4))
def test_a_loss_left_on_the_block(stage: int) -> None:
    model = net_that_calls(lambda b, x: b(x), AuxiliaryBlock)
    check(Case(model=model, loss=with_auxiliary_losses), stage, num_ranks=2)


class InvertibleBlock(Block):
    def inverse(self, x: Tensor) -> Tensor:
        return x - torch.tanh(self.up(x))[:, :8]


class Flow(Net):
    block = InvertibleBlock

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        for block in reversed(self.blocks):
            x = block.inverse(x)
        return self.head(x)


@pytest.mark.parametrize("stage", range(4))
def test_a_method_of_a_block_other_than_forward(stage: int) -> None:
    check(Case(model=Flow), stage, num_ranks=2)


# --- ranks that use different parameters -----------------------------------------------------


def add_where(mask: Tensor, out: Tensor, values: Callable[[], Tensor]) -> Tensor:
    if not mask.any():
        return out
    addition = torch.zeros_like(out)
    addition[mask] = values()
    return out + addition


class Routed(Net):
    """An expert outside the blocks that only rank 1's samples need."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 3] > 0.5
        return add_where(mask, super().forward(x), lambda: self.expert(x[mask]))


class RoutedBlock(Block):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return add_where(self.mask, super().forward(x), lambda: self.expert(x[self.mask]))


class RoutedInBlocks(Net):
    """An expert inside each block that only rank 1's samples need."""

    block = RoutedBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.mask = x[:, 3] > 0.5
        return super().forward(x)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        for block in self.blocks:
            block.extra = nn.Parameter(torch.ones(5))


@pytest.mark.parametrize("model", [Routed, RoutedInBlocks])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_parameter_used_on_one_rank_only(model: type[Net], stage: int, num_ranks: int) -> None:
    case = Case(model=model, optimizer=adam, data=batches_marked_for_rank_one)
    check(case, stage, num_ranks)


@pytest.mark.parametrize("stage", range(4))
def test_parameters_that_nobody_uses(stage: int) -> None:
    check(Case(model=Unused, optimizer=adam), stage, num_ranks=2)
