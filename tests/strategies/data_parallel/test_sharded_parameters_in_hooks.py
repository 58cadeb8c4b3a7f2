"""Parameters that are in shards are read and written as a single device's are."""

import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import ConfigError, HybridParallelStrategy
from tests.strategies.data_parallel.momentum_teachers import TOLERANCE, Taught, assert_same, train
from tests.strategies.parity import ignoring

pytestmark = ignoring(
    ".*this fit will run with no optimizer", "'neck.weight' was replaced by another parameter"
)


def block_weight(model: Taught) -> nn.Parameter:
    return model.net.blocks[1].up.weight


def detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


READINGS: dict[str, Callable[[Taught], Any]] = {
    "norm": lambda model: [p.norm() for p in model.parameters()],
    "norm of data": lambda model: [p.data.norm(p=1) for p in model.parameters()],
    "count": lambda model: sum(p.numel() for p in model.parameters()),
    "shapes": lambda model: [tuple(p.shape) for p in model.parameters()],
    "mean": lambda model: block_weight(model).mean(),
    "spread": lambda model: block_weight(model).detach().std(),
    "largest": lambda model: [p.detach().abs().max() for p in model.net.parameters()],
    "vector": lambda model: nn.utils.parameters_to_vector(model.net.parameters()),
    "rows": lambda model: block_weight(model).detach().norm(dim=1),
    "row": lambda model: block_weight(model)[2],
    "number": lambda model: model.head.weight[1, 2].item(),
    "numbers": lambda model: model.head.bias.tolist(),
    "numpy": lambda model: torch.from_numpy(block_weight(model).detach().cpu().numpy().copy()),
    "product": lambda model: model.head.weight.detach() @ model.neck.weight.data,
    "normalised": lambda model: F.normalize(block_weight(model).data, dim=1),
    "sorted": lambda model: model.head.weight.detach().flatten().sort().values,
    "to others": lambda model: torch.cosine_similarity(
        model.neck.weight.detach().flatten(), model.net.last.weight.detach().flatten(), dim=0
    ),
    "equal": lambda model: torch.equal(model.neck.weight, model.neck.weight.clone()),
    "state": lambda model: [value.double().sum() for value in model.state_dict().values()],
    "rank of matrix": lambda model: torch.linalg.matrix_norm(block_weight(model).detach(), 2),
}


def as_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [as_plain(one) for one in value]
    if hasattr(value, "full_tensor"):
        return value.full_tensor().detach()
    return detached(value)


class Reads(Taught):
    """Reads in hooks, in training_step and in validation_step."""

    def __init__(self) -> None:
        super().__init__("in_place", "never")
        self.seen: list[dict[str, Any]] = []

    def read(self) -> None:
        if self.trainer.global_step:
            self.seen.append({name: as_plain(make(self)) for name, make in READINGS.items()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.read()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            self.read()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.read()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.read()
        super().validation_step(batch, batch_idx)

    def on_train_end(self) -> None:
        collectives = getattr(self.trainer.strategy, "collectives", None)
        self.ranks = (
            [self.seen] if collectives is None else collectives.all_gather_object(self.seen)
        )


def what_is_read(**options: Any) -> list[list[dict[str, Any]]]:
    made: list[Reads] = []

    def make() -> Reads:
        made.append(Reads())
        return made[0]

    train(make, max_epochs=1, **options)
    return made[0].ranks


@cache
def read_alone() -> list[dict[str, Any]]:
    return what_is_read()[0]


def two_copies() -> HybridParallelStrategy:
    return HybridParallelStrategy(backend="in_process", data_parallel_size=(2, 2), zero_stage=3)


SCHEMES: dict[str, tuple[Callable[[], Any], int]] = {
    "zero2": (lambda: "zero2_in_process", 3),
    "zero3": (lambda: "zero3_in_process", 3),
    "two copies": (two_copies, 4),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_norms_and_elements_are_those_of_full_parameters(scheme: str) -> None:
    """Norms and elements were those of a rank's own shard."""
    make, num_ranks = SCHEMES[scheme]
    expected = read_alone()
    for seen in what_is_read(strategy=make(), devices=num_ranks):
        assert len(seen) == len(expected) >= 3
        for mine, theirs in zip(seen, expected, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, msg=name, **TOLERANCE)


@torch.no_grad()
def clear_row(model: Taught) -> None:
    model.head.weight[0].zero_()
    block_weight(model)[3, 1:4] = 0.5
    model.neck.bias[-1] += 1


def clear_column(model: Taught) -> None:
    block_weight(model).data[:, 0] = 0.0
    model.neck.weight.data.T[1].mul_(2)
    model.head.weight.data.view(-1)[::2].clamp_(-0.1, 0.1)


@torch.no_grad()
def clear_small(model: Taught) -> None:
    weight = block_weight(model)
    weight[weight.abs() < 0.1] = 0
    model.neck.weight.masked_fill_(torch.eye(7, dtype=torch.bool), 1.0)
    model.head.weight.index_fill_(1, torch.tensor([0, 3]), 0.25)
    for row in model.net.last.weight:
        row.div_(row.norm())


@torch.no_grad()
def normalise(model: Taught) -> None:
    weight = block_weight(model)
    weight.copy_(F.normalize(weight, dim=1))
    weight.data = weight.data / weight.data.norm(dim=0, keepdim=True)
    model.neck.weight.sub_(model.neck.weight.mean(dim=1, keepdim=True))
    model.head.weight.mul_(torch.linspace(0.5, 1, 7, dtype=torch.float64))


@torch.no_grad()
def from_vector(model: Taught) -> None:
    vector = nn.utils.parameters_to_vector(model.net.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.net.parameters())


@torch.no_grad()
def initialise(model: Taught) -> None:
    torch.manual_seed(11)
    model.net.blocks[2].up.reset_parameters()
    nn.init.orthogonal_(model.neck.weight)
    nn.init.normal_(model.head.weight, std=0.1)
    model.net.last.weight.add_(torch.randn_like(model.net.last.weight), alpha=0.01)


@torch.no_grad()
def swap(model: Taught) -> None:
    first, last = model.net.blocks[0].up, model.net.blocks[2].up
    first.weight.data, last.weight.data = last.weight.data, first.weight.data.clone()
    model.net.last.weight.lerp_(model.neck.weight, 0.5)
    model.neck.weight = nn.Parameter(model.neck.weight * 0.5)


EDITS = (clear_row, clear_column, clear_small, normalise, from_vector, initialise, swap)


class Edits(Taught):
    """Does one edit after each batch, in turn, and the first ones in other hooks, too."""

    def __init__(self, edits: tuple[Callable[[Taught], None], ...] = EDITS) -> None:
        super().__init__("in_place", "never")
        self.edits = edits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.edits[(self.global_step - 1) % len(self.edits)](self)

    def on_validation_epoch_start(self, *_: Any) -> None:
        clear_row(self)


@cache
def edited_alone() -> Any:
    return train(Edits)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero3", "two copies"])
def test_an_edit_by_index_reaches_the_element_of_the_full_weight(scheme: str) -> None:
    """An edit by index reached one element of each shard."""
    make, num_ranks = SCHEMES[scheme]
    assert_same(train(Edits, strategy=make(), devices=num_ranks), edited_alone())


class EditsBeforeSteps(Taught):
    """Edits where stages 1 and 2 show shards, too."""

    def __init__(self) -> None:
        super().__init__("in_place", "never")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clear_row(self)
        clear_small(self)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_edit_by_index_before_a_step_reaches_full_weights(strategy: str) -> None:
    """An edit by index before a step reached shards."""
    result = train(EditsBeforeSteps, strategy=f"{strategy}_in_process", devices=3)
    assert_same(result, train(EditsBeforeSteps))


class ByHand(Taught):
    """Sharpness-aware steps, and updates without an optimizer."""

    def __init__(self, foreach: bool = False) -> None:
        super().__init__("in_place", "never")
        self.automatic_optimization = False
        self.foreach = foreach

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        trained = [p for p in self.parameters() if p.requires_grad]
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        moves = [p.grad * (0.05 / norm) for p in trained]
        with torch.no_grad():
            for p, move in zip(trained, moves, strict=True):
                p.add_(move)
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            for p, move in zip(trained, moves, strict=True):
                p.sub_(move)
            if self.foreach:
                torch._foreach_add_(trained, [p.grad for p in trained], alpha=-0.1)
            for p in trained if not self.foreach else ():
                p -= 0.1 * p.grad

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("foreach", [False, True])
def test_updates_by_hand_train_as_on_one_device(strategy: str, foreach: bool) -> None:
    """Updates by hand were refused."""
    make = partial(ByHand, foreach)
    result = train(make, strategy=f"{strategy}_in_process", devices=2, max_epochs=1)
    assert_same(result, train(make, max_epochs=1))


class Anchored(Taught):
    """A penalty over all parameters, against what they were when the fit began."""

    def __init__(self) -> None:
        super().__init__("in_place", "never")
        self.anchors: list[Tensor] = []

    def on_fit_start(self) -> None:
        self.anchors = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pairs = zip(self.parameters(), self.anchors, strict=True)
        penalty = sum((p - anchor).square().sum() for p, anchor in pairs)
        return super().training_step(batch, batch_idx) + 0.1 * penalty

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.anchors = [p.detach().clone() for p in self.parameters()]


def test_a_penalty_over_parameters_trains_as_on_one_device() -> None:
    """A penalty over parameters was refused."""
    result = train(Anchored, strategy="zero3_in_process", devices=2)
    assert_same(result, train(Anchored))


class ReadsInBackward(Taught):
    """Divides a gradient by the norm of a block's weight, and pulls another to that weight."""

    def __init__(self) -> None:
        super().__init__("in_place", "never")

    def on_fit_start(self) -> None:
        first, second = (block.up.weight for block in self.net.blocks[:2])
        first.register_hook(lambda grad: grad + 0.1 * second.detach())
        second.register_hook(lambda grad: grad + first.detach() / 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad / block_weight(self).detach().norm())
        return loss


def test_a_hook_in_backward_reads_full_weights() -> None:
    """It read a rank's own shard, and gradients were wrong without a word, or an error of sizes."""
    result = train(ReadsInBackward, strategy="zero3_in_process", devices=2)
    assert_same(result, train(ReadsInBackward))


class Acts(Taught):
    """Does something after the second batch."""

    def __init__(self, act: Callable[["Acts"], None]) -> None:
        super().__init__("in_place", "never")
        self.act = act

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.act(self)


class NewOptimizer(Acts):
    """Gets another optimizer, which this package has never seen, in the middle of a fit."""

    def __init__(self) -> None:
        super().__init__(self.exchange)

    def exchange(self, _: Any) -> None:
        trained = [p for p in self.parameters() if p.requires_grad]
        self.trainer.optimizers = [torch.optim.SGD(trained, lr=0.05)]


def test_an_optimizer_that_is_made_in_a_hook_steps() -> None:
    """The step of an optimizer made in a hook was lost."""
    result = train(NewOptimizer, strategy="zero3_in_process", devices=2)
    assert_same(result, train(NewOptimizer))


def pickles(model: Acts) -> None:
    pickle.dumps(model.neck.weight.data)


def edits_a_leaf(model: Acts) -> None:
    block_weight(model).mul_(2)


def sets_anothers_gradient(model: Acts) -> None:
    model.neck.weight.grad = torch.zeros_like(block_weight(model))


def keeps_until_the_end(model: Acts) -> None:
    model.on_fit_end = lambda: kept.norm()  # type: ignore[method-assign]
    kept = model.neck.weight.detach().clone()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (pickles, ConfigError, r"'neck.weight' lies in shards .*full_tensor\(\)"),
        (edits_a_leaf, RuntimeError, "a leaf Variable that requires grad"),
        (sets_anothers_gradient, ConfigError, r"'neck.weight' was set .*'net.blocks.1.up.weight'"),
        (keeps_until_the_end, ConfigError, r"used after its run.*on_train_end"),
    ],
)
def test_what_shards_cannot_do_is_an_error_that_says_what_can(
    act: Callable[[Acts], None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(partial(Acts, act), strategy="zero3_in_process", devices=2, max_epochs=1)


class SeesClasses(L.Callback):
    """Notes the class of a block's weight outside of the block and in its forward."""

    def __init__(self) -> None:
        self.outside: list[type] = []
        self.inside: list[type] = []
        self.updated: list[type] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Taught, *_: Any) -> None:
        block, optimizer = pl_module.net.blocks[1], trainer.optimizers[0]
        weight = block.up.weight
        self.outside.append(type(weight))
        assert isinstance(weight, nn.Parameter)
        if len(self.outside) == 1:
            block.up.register_forward_hook(lambda *_: self.inside.append(type(weight)))
            optimizer.register_step_pre_hook(lambda *_: self.updated.append(type(weight)))


def test_blocks_and_optimizers_meet_plain_parameters() -> None:
    seen = SeesClasses()
    made: list[Taught] = []

    def make() -> Taught:
        made.append(Taught("in_place", "never"))
        return made[0]

    train(make, callbacks=[seen], strategy="zero3_in_process", devices=1, max_epochs=1)
    assert seen.outside[1].__name__ == "ShardedParameter"
    assert set(seen.inside) == {nn.Parameter}
    assert {type(param) for param in made[0].parameters()} == {nn.Parameter}
