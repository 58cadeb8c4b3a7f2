"""Momentum teachers under ZeRO stage 3, where student and teacher are in shards between steps."""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn, vmap
from torch.func import functional_call, stack_module_state
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_shard import ConfigError, HybridParallelStrategy, ZeRO3Strategy
from tests.strategies.data_parallel.momentum_teachers import (
    TOLERANCE,
    WIDTH,
    Result,
    Taught,
    assert_same,
    train,
)
from tests.strategies.parity import ignoring
from tests.strategies.stacks import Stack, fit

pytestmark = ignoring()


def zero3(**options: Any) -> ZeRO3Strategy:
    return ZeRO3Strategy(backend="in_process", **options)


def two_copies() -> HybridParallelStrategy:
    return HybridParallelStrategy(backend="in_process", data_parallel_size=(2, 2), zero_stage=3)


@cache
def single_device(*arguments: Any) -> Result:
    return train(partial(Taught, *arguments))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        ("foreach", "on_train_batch_end"),
        ("foreach", "training_step", True),
        ("written_out", "on_train_batch_end"),
        ("by_state", "on_before_zero_grad"),
        ("loaded", "on_train_epoch_end", False, "setup"),
        ("in_place", "on_before_optimizer_step", True, "configure_model"),
        ("assigned", "training_step", False, "configure_model"),
    ],
)
def test_teacher_meets_other_elements_than_its_students(
    arguments: tuple[Any, ...], num_ranks: int
) -> None:
    result = train(partial(Taught, *arguments), strategy=zero3(), devices=num_ranks)
    assert_same(result, single_device(*arguments))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("make", "num_ranks"),
    [
        (two_copies, 4),
        (partial(zero3, bucket_mb=0.0001), 3),
        pytest.param(partial(zero3, units=["Backbone"]), 3, marks=pytest.mark.slow),
    ],
)
def test_teacher_is_cut_otherwise_in_other_units(make: Callable[[], Any], num_ranks: int) -> None:
    arguments = ("foreach", "on_train_batch_end")
    result = train(partial(Taught, *arguments), strategy=make(), devices=num_ranks)
    assert_same(result, single_device(*arguments))


class MovedAfterStudent(Taught):
    """Moves the teacher once the student has run: the last step's order says that it is next."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        features = self.net(x)
        self.update(self.net, self.teacher)
        with torch.no_grad():
            wanted = self.teacher(x)
        loss = nn.functional.mse_loss(features, wanted)
        self.losses.append(loss.detach())
        return loss + nn.functional.cross_entropy(self.head(self.neck(features)), y)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("update", ["in_place", "assigned"])
def test_teacher_is_gathered_before_it_is_moved(update: str) -> None:
    make = partial(MovedAfterStudent, update, "never")
    result = train(make, strategy=zero3(bucket_mb=0.0001), devices=3)
    assert_same(result, train(make))


class AverageOfState(nn.Module):
    """An average that goes through `state_dict`, as timm's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        own, theirs = self.module.state_dict().values(), model.state_dict().values()
        torch._foreach_lerp_(list(own), list(theirs), weight=0.5)


def torchs_average(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


class OwnAverage(Callback):
    """Averages a copy that it makes in a hook, and calls it in validation."""

    def __init__(self, hook: str, make: Callable[[nn.Module], Any]) -> None:
        self.hook, self.make, self.average = hook, make, None
        self.outputs: list[float] = []

    def _called(self, hook: str, module: nn.Module) -> None:
        if hook == self.hook and self.average is None:
            self.average = self.make(module)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._called("setup", pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._called("on_fit_start", pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any
    ) -> None:
        self._called("on_train_batch_start", pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.average.update_parameters(pl_module)

    @torch.no_grad()
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        value = self.average.module(batch[0]).square().mean()
        self.outputs.append(trainer.strategy.reduce(value).item())


def averaged(hook: str, make: Callable[[nn.Module], Any], **options: Any) -> OwnAverage:
    callback = OwnAverage(hook, make)
    train(partial(Taught, "in_place"), callbacks=[callback], **options)
    return callback


@pytest.mark.slow
@pytest.mark.parametrize("make", [AverageOfState, torchs_average])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
def test_average_of_a_callback_has_full_tensors_or_keeps_shards(
    hook: str, make: Callable[[nn.Module], Any]
) -> None:
    expected = averaged(hook, make)
    got = averaged(hook, make, strategy=zero3(), devices=3)
    torch.testing.assert_close(
        torch.tensor(got.outputs), torch.tensor(expected.outputs), **TOLERANCE
    )
    state = got.average.state_dict()
    for name, value in expected.average.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name, **TOLERANCE)
    x = torch.ones(2, 5, dtype=torch.float64)
    torch.testing.assert_close(got.average.module(x), expected.average.module(x), **TOLERANCE)


def test_copy_of_full_tensors_meets_shards_as_it_meets_full_ones() -> None:
    expected = averaged("setup", AverageOfState)
    got = averaged("setup", AverageOfState, strategy=zero3(), devices=2)
    torch.testing.assert_close(got.outputs, expected.outputs, **TOLERANCE)


class Wrong(Taught):
    """Does in its hook what cannot work on shards."""

    def __init__(self, act: Callable[["Wrong"], None]) -> None:
        super().__init__("in_place", "never")
        self.act = act

    def on_train_batch_end(self, *_: Any) -> None:
        self.act(self)


@torch.no_grad()
def mix_blocks(model: Wrong) -> None:
    first, last = model.net.blocks[0], model.teacher.blocks[2]
    for p, q in zip(first.parameters(), last.parameters(), strict=True):
        q.mul_(0.5).add_(p, alpha=0.5)


def mix_lists(model: Wrong) -> None:
    first, last = model.net.blocks[0], model.teacher.blocks[2]
    torch._foreach_lerp_(
        [p.data for p in last.parameters()], [p.data for p in first.parameters()], weight=0.5
    )


def copy_anew(model: Wrong) -> None:
    model.teacher = copy.deepcopy(model.net)


def train_copy(model: Wrong) -> None:
    copy.deepcopy(model.net)(torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("act", [mix_blocks, mix_lists])
def test_parameters_that_are_cut_otherwise_meet_other_elements(
    act: Callable[[Wrong], None],
) -> None:
    result = train(partial(Wrong, act), strategy=zero3(), devices=2)
    assert_same(result, train(partial(Wrong, act)))


def test_a_copy_of_shards_is_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"A copy of a Backbone .* torch.no_grad"):
        train(partial(Wrong, train_copy), strategy=zero3(), devices=2)


@pytest.mark.slow
def test_a_teacher_that_is_copied_anew_is_one_devices() -> None:
    """A module that was replaced in a hook was refused."""
    make = partial(Wrong, copy_anew)
    assert_same(train(make, strategy=zero3(), devices=2), train(make))


@pytest.mark.slow
def test_full_tensors_are_not_loaded_into_shards() -> None:
    values = {"weight": torch.full((WIDTH, WIDTH), 0.5), "bias": torch.full((WIDTH,), 0.25)}

    def act(model: Wrong) -> None:
        model.neck.load_state_dict({name: value.double() for name, value in values.items()})

    result = train(partial(Wrong, act), strategy=zero3(), devices=3)
    for name, value in values.items():
        torch.testing.assert_close(result.weights[f"neck.{name}"], value.double())


class Saving(Taught):
    """Puts weights into the checkpoint by itself."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"teacher": self.teacher.state_dict(), "neck": [self.neck.weight.data]}


class SavingAverage(OwnAverage):
    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.module.state_dict()}


@pytest.mark.slow
def test_checkpoint_has_shards_of_what_a_hook_has_put_there(tmp_path: Path) -> None:
    files = []
    for number, options in enumerate([{}, {"strategy": zero3(), "devices": 3}]):
        average = SavingAverage("on_train_batch_start", AverageOfState)
        saving = ModelCheckpoint(tmp_path / str(number), save_last=True)
        callbacks = [average, saving]
        make = partial(Saving, "foreach")
        train(make, callbacks=callbacks, enable_checkpointing=True, **options)
        files.append(torch.load(tmp_path / str(number) / "last.ckpt", weights_only=False))
    expected, got = files
    for name, value in expected["own"]["teacher"].items():
        torch.testing.assert_close(got["own"]["teacher"][name], value, **TOLERANCE)
    torch.testing.assert_close(got["own"]["neck"], expected["own"]["neck"], **TOLERANCE)
    averages = expected["callbacks"]["SavingAverage"]["average"]
    for name, value in averages.items():
        full = got["callbacks"]["SavingAverage"]["average"][name]
        torch.testing.assert_close(full, value, msg=name, **TOLERANCE)


class Ensemble(Stack):
    """Calls its blocks at once, by a copy of one that a step has made without values."""

    def forward(self, x: Tensor) -> Tensor:
        values, buffers = stack_module_state(list(self.blocks))
        block = copy.deepcopy(self.blocks[0]).to("meta")

        def call(own: Any, its: Any, inputs: Tensor) -> Tensor:
            return functional_call(block, (own, its), (inputs,))

        return self.head(vmap(call, (0, 0, None))(values, buffers, self.embed(x)).mean(0))


def test_an_ensemble_by_a_copy_of_one_block_trains() -> None:
    """A hook that came along with the copy looked for it among the model's blocks: KeyError."""
    strategy = ZeRO3Strategy(backend="in_process")
    got, alone = fit(Ensemble, strategy, devices=2), fit(Ensemble)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-5, atol=1e-6)


class Aliased(Stack):
    """Calls its second block once more, by shallow copies, one of which lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.last = [copy.copy(self.blocks[2])]  # a list, in which torch looks for no modules

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return super().forward(x) + self.head(self.last[0](copy.copy(self.blocks[1])(h)))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_shallow_copy_of_a_block_runs_as_the_block(num_ranks: int) -> None:
    """The block's hook, which came along, looked for the copy among the model's: KeyError."""
    got, alone = fit(Aliased, zero3(), devices=num_ranks), fit(Aliased)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-5, atol=1e-6)
