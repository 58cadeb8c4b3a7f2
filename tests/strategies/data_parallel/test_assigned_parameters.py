"""What user code assigns to `param.data`, or puts in a parameter's place, trains and is saved."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import (
    ConfigError,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
)
from tests.strategies.data_parallel.momentum_teachers import (
    WIDTH,
    Result,
    Taught,
    assert_same,
    train,
)
from tests.strategies.parity import ignoring
from tests.strategies.stacks import Stack, trainer_of

pytestmark = ignoring(
    ".*microbatches are fewer than the", ".*AMP with fp16 is not supported on CPU"
)

WAYS = [
    ("assigned", "on_train_batch_end"),
    ("assigned", "training_step"),
    ("assigned", "on_validation_epoch_start"),
    ("clamped_too", "on_before_optimizer_step"),
    ("loaded_by_assigning", "on_before_zero_grad"),
    ("replaced", "on_train_epoch_end"),
    ("set_in_place", "on_train_batch_start"),
    ("aliased", "on_train_batch_end"),
    ("of_another_dtype", "on_train_epoch_end"),
]
STAGES = ["shard_ddp", pytest.param("zero1", marks=pytest.mark.slow), "zero2", "zero3"]


@cache
def single_device(update: str, hook: str) -> Result:
    return train(partial(Taught, update, hook))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize(("update", "hook"), WAYS)
def test_view_is_put_back_over_an_assigned_tensor(update: str, hook: str, strategy: str) -> None:
    result = train(partial(Taught, update, hook), strategy=f"{strategy}_in_process", devices=2)
    assert_same(result, single_device(update, hook))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_edit_of_frozen_shards_before_the_update_reaches_one_rank_only(strategy: str) -> None:
    make = partial(Taught, "in_place", "on_before_optimizer_step")
    result = train(make, strategy=f"{strategy}_in_process", devices=3)
    assert_same(result, single_device("in_place", "on_before_optimizer_step"))


def in_single_precision(update: str) -> Taught:
    return Taught(update).float()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("shard_ddp", "bf16-mixed"),
        ("zero2", "16-mixed"),
        ("zero3", "bf16-mixed"),
        ("zero2", "bf16-true"),
        ("local_sgd", "32-true"),
        ("async_sgd", "32-true"),
    ],
)
def test_assigning_is_not_what_an_edit_in_place_is(strategy: str, precision: str) -> None:
    options = {"strategy": f"{strategy}_in_process", "devices": 2, "precision": precision}
    assigned = train(partial(in_single_precision, "assigned"), **options)
    in_place = train(partial(in_single_precision, "in_place"), **options)
    assert_same(assigned, in_place)


class Hooked(Taught):
    """Calls a function after each batch."""

    def __init__(self, then: Callable[["Hooked"], None]) -> None:
        super().__init__("in_place", "never")
        self.then = then

    def on_train_batch_end(self, *_: Any) -> None:
        self.then(self)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3"])
def test_a_checkpoint_has_what_was_assigned_before_it(strategy: str, tmp_path: Path) -> None:
    """A checkpoint lacked what was assigned before it."""

    def then(model: Hooked) -> None:
        model.neck.weight.data = model.neck.weight.data * 0 + 0.5
        fresh = torch.full_like(model.head.bias, 0.25)
        model.head.bias = nn.Parameter(fresh)
        model.trainer.save_checkpoint(tmp_path / "saved.ckpt")

    options = {"strategy": f"{strategy}_in_process", "devices": 2}
    train(partial(Hooked, then), max_steps=1, **options)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    expected = torch.full((WIDTH, WIDTH), 0.5, dtype=torch.float64)
    torch.testing.assert_close(saved["neck.weight"], expected)
    torch.testing.assert_close(saved["head.bias"], torch.full((3,), 0.25, dtype=torch.float64))


def of_wrong_shape(model: Hooked) -> None:
    model.neck.weight.data = torch.zeros(3, 3, dtype=torch.float64)


def untied(model: Hooked) -> None:
    model.tied.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))


class Tied(Hooked):
    def __init__(self, then: Callable[[Hooked], None]) -> None:
        super().__init__(then)
        self.tied = nn.Linear(WIDTH, WIDTH).double()
        self.tied.weight = self.neck.weight


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3"])
def test_a_value_that_cannot_be_the_parameters_is_refused(strategy: str) -> None:
    """A value that cannot be the parameter's was lost."""
    message = r"shape \(3, 3\) was assigned to the parameter 'neck.weight', expected"
    with pytest.raises(ConfigError, match=message):
        train(partial(Tied, of_wrong_shape), strategy=f"{strategy}_in_process", devices=2)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3"])
def test_a_tie_that_is_undone_in_mid_run_is_one_devices(strategy: str) -> None:
    """To give one place of a tied weight a parameter of its own was refused."""
    make = partial(Tied, untied)
    assert_same(train(make, strategy=f"{strategy}_in_process", devices=2), train(make))


class ByHand(Taught):
    """Manual optimization; assigns inside the step, before and after the update."""

    def __init__(self) -> None:
        super().__init__("assigned", "never")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.update(self.net, self.teacher)
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.neck.weight.data = self.neck.weight.data.clamp(-0.2, 0.2)
        self.update(self.net, self.teacher)


class Assigning(torch.optim.SGD):
    """Writes its updates as old code does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad
        return loss


class WithOldOptimizer(Taught):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Assigning([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3"])
@pytest.mark.parametrize("make", [ByHand, WithOldOptimizer])
def test_a_step_trains_what_it_has_assigned(make: Callable[[], Taught], strategy: str) -> None:
    """A step lost what it had assigned."""
    result = train(make, strategy=f"{strategy}_in_process", devices=2)
    assert_same(result, train(make))


class Constrained(Stack):
    """Keeps its weights small, as constraints in hooks do."""

    def on_train_batch_end(self, *_: Any) -> None:
        for param in self.parameters():
            param.data = param.data.clamp(-0.2, 0.2)


SPLIT = {
    "pipeline": (2, lambda: PipelineParallelStrategy(backend="in_process")),
    "tensor": (
        2,
        lambda: TensorParallelStrategy(
            backend="in_process", plan={"blocks.*.layer": "colwise_gather_output"}
        ),
    ),
    "hybrid": (
        4,
        lambda: HybridParallelStrategy(
            backend="in_process", pipeline_parallel_size=2, zero_stage=3, num_microbatches=2
        ),
    ),
}


def constrained(**options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Constrained()
    trainer_of(**options).fit(model)
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SPLIT)
def test_a_split_model_trains_what_was_assigned(scheme: str) -> None:
    """A split model lost what was assigned."""
    num_ranks, make = SPLIT[scheme]
    expected = constrained()
    got = constrained(strategy=make(), devices=num_ranks)
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert max(value.abs().max().item() for value in got.values()) < 0.201


class Renormed(nn.Linear):
    """Keeps its weight small in its own forward."""

    assigns = False

    def forward(self, x: Tensor) -> Tensor:
        value = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.4)
        if self.assigns:
            self.weight.data = value
        else:
            self.weight.data.copy_(value)
        return super().forward(x)


class AssigningForward(Renormed):
    assigns = True


class KeptSmall(Taught):
    def __init__(self, layer: type[Renormed]) -> None:
        super().__init__("in_place")
        for block in (*self.net.blocks, *self.teacher.blocks):
            block.up.__class__ = layer


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Renormed, AssigningForward])
def test_block_forgets_what_its_forward_did_to_its_weight(layer: type[Renormed]) -> None:
    make = partial(KeptSmall, layer)
    result = train(make, strategy="zero3_in_process", devices=3)
    assert_same(result, train(make))


class Swapping(Taught):
    """Validates with an average of its weights; keeps the weights themselves by reference."""

    def __init__(self) -> None:
        super().__init__("in_place")
        self.average: list[Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        new = [p.data for p in self.net.parameters()]
        old = self.average or new
        self.average = [a * 0.5 + p * 0.5 for a, p in zip(old, new, strict=True)]

    def _assign(self, values: list[Tensor]) -> None:
        for p, value in zip(self.net.parameters(), values, strict=True):
            p.data = value

    def on_validation_epoch_start(self) -> None:
        self.kept = [p.data for p in self.net.parameters()]
        self._assign(self.average)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self(batch[0].to(self.dtype)).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self._assign(self.kept)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_weights_that_are_kept_aside_stay(strategy: str) -> None:
    """Weights that were kept aside were overwritten."""
    result = train(Swapping, strategy=f"{strategy}_in_process", devices=2)
    assert_same(result, train(Swapping))


class SwappingInSinglePrecision(Swapping):
    def __init__(self) -> None:
        super().__init__()
        self.float()


class SwappingByCopies(SwappingInSinglePrecision):
    def on_validation_epoch_start(self) -> None:
        self.kept = [p.data.clone() for p in self.net.parameters()]
        self._assign(self.average)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero2", "bf16-mixed"), ("local_sgd", "32-true")]
)
def test_weights_kept_by_reference_are_not_what_copies_are(strategy: str, precision: str) -> None:
    options = {"strategy": f"{strategy}_in_process", "devices": 2, "precision": precision}
    assert_same(train(SwappingInSinglePrecision, **options), train(SwappingByCopies, **options))


def test_initialising_a_shard_is_an_error_of_torchs() -> None:
    def then(model: Hooked) -> None:
        nn.init.eye_(model.neck.weight)
        torch.manual_seed(5)
        model.net.blocks[1].up.reset_parameters()

    result = train(partial(Hooked, then), strategy="zero3_in_process", devices=2)
    assert_same(result, train(partial(Hooked, then)))
