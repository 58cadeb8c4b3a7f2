"""Asynchronous SGD under a Trainer: what equals other trainings, its synchronous start, errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_shard import AsyncSGDStrategy, ConfigError, DDPStrategy, ZeRO1Strategy
from lightning_shard.data_parallel.async_sgd.async_sgd import AsyncCounters
from tests.data_parallel.async_sgd.programs import let_others_run
from tests.strategies.local_sgd.local_training import (
    BATCH,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    tiny_data,
    weights_of,
)
from tests.strategies.local_sgd.test_consensus import SaveAt, WithValidation
from tests.strategies.models import ConvNet
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring(
    "Be aware that when using `ckpt_path`", "You're resuming from a checkpoint that ended before"
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Scheduled(Tiny):
    """With any optimizer, and a learning rate that changes at every step."""

    def __init__(self, optimizer: str = "momentum") -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SlowRank(L.Callback):
    """Lets the others run before each batch of one rank; in an in-process world."""

    def __init__(self, rank: int = 1, turns: int = 15) -> None:
        self.rank, self.turns = rank, turns

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.world_size > 1:
            let_others_run(self.turns)


def trainer_of(num_ranks: int, num_steps: int, bound: int, **more: Any) -> L.Trainer:
    defaults = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}
    strategy = AsyncSGDStrategy(backend="in_process", staleness_bound=bound)
    options = {"strategy": strategy, "devices": num_ranks, "max_steps": num_steps}
    return quiet_trainer(**(options | defaults | more))


def tiny_run(num_ranks: int, num_steps: int, accumulate: int = 1) -> TinyData:
    return TinyData(tiny_data(num_ranks * BATCH * num_steps * accumulate))


# --- what equals other trainings -----------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(n, marks=() if n == "adamw" else pytest.mark.slow) for n in OPTIMIZERS],
)
def test_a_bound_of_zero_is_synchronous(optimizer: str) -> None:
    """With clipping, accumulation and a schedule: bit for bit zero1, and shard_ddp to rounding."""
    runs = []
    for kind in (AsyncSGDStrategy, ZeRO1Strategy, DDPStrategy):
        options = {"staleness_bound": 0} if kind is AsyncSGDStrategy else {}
        strategy = kind(backend="in_process", **options)
        module = Scheduled(optimizer)
        more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}
        trainer = trainer_of(3, 20, 0, strategy=strategy, **more)
        trainer.fit(module, datamodule=tiny_run(3, 20, accumulate=2))
        runs.append(weights_of(module))
    ours, zero1, ddp = runs
    for name, value in ours.items():
        assert torch.equal(value, zero1[name])
    assert_same_weights(ours, ddp, rtol=1e-10)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_rank_is_a_single_device(optimizer: str) -> None:
    """Its gradients are never old: clipping, accumulation and schedule are those of one device."""
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}
    ours, plain = Scheduled(optimizer), Scheduled(optimizer)
    trainer_of(1, 20, 3, **more).fit(ours, datamodule=tiny_run(1, 20, accumulate=2))
    single = quiet_trainer(max_steps=20, limit_val_batches=0, **more)
    single.fit(plain, train_dataloaders=torch.utils.data.DataLoader(tiny_data(160), BATCH))
    assert_same_weights(weights_of(ours), weights_of(plain))


class OwnNorm(L.Callback):
    """What a rank's own gradient is when the optimizer is about to see it, and its norm."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        grads = [param.grad for param in pl_module.parameters()]
        assert [g.shape for g in grads] == [p.shape for p in pl_module.parameters()]
        expected = nn.utils.get_total_norm(grads)
        torch.testing.assert_close(trainer.strategy.gradient_norm(), expected)


def test_user_code_sees_the_own_gradient_full() -> None:
    trainer_of(2, 5, 2, callbacks=[OwnNorm(), SlowRank()]).fit(Tiny(), datamodule=tiny_run(2, 5))


def test_bf16_mixed_and_bf16_true_train() -> None:
    for precision in ("bf16-mixed", "bf16-true"):
        module = Validated()
        data = GlobalBatches(module, 5)
        before = weights_of(module)
        trainer_of(2, 5, 2, precision=precision).fit(module, datamodule=data)
        after = weights_of(module)
        assert any(not torch.equal(before[name], value) for name, value in after.items())
        assert all(bool(value.isfinite().all()) for value in after.values())


class Validated(ConvNet):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


# --- what ranks agree on -------------------------------------------------------------------------


class Seen(L.Callback):
    """Every rank's weights at each validation, at the end of epochs, and when the fit has ended."""

    def __init__(self) -> None:
        self.of_ranks: list[list[Weights]] = []
        self.counters: list[AsyncCounters] = []

    def gather(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ranks = trainer.strategy.collectives
        self.of_ranks.append(ranks.all_gather_object(weights_of(pl_module)))

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.gather(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.gather(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.gather(trainer, pl_module)
        self.counters = trainer.strategy.collectives.all_gather_object(trainer.strategy.counters)


@pytest.mark.slow
def test_ranks_agree_at_validations_epochs_and_the_end() -> None:
    """With running statistics, which come from rank 0."""
    torch.manual_seed(7)
    module, seen = Validated(), Seen()
    options = {"limit_val_batches": 1, "val_check_interval": 4, "num_sanity_val_steps": 1}
    trainer = trainer_of(3, 25, 3, callbacks=[SlowRank(), seen], max_epochs=3, **options)
    trainer.fit(module, datamodule=WithValidation(module, 5))  # 10 batches in an epoch
    assert len(seen.of_ranks) == 1 + 5 + 3 + 1  # the sanity check's first
    for ranks in seen.of_ranks:
        for weights in ranks:
            assert_same_weights(weights, ranks[0], rtol=0, atol=0)
    assert_same_weights(weights_of(module), seen.of_ranks[-1][0], rtol=0, atol=0)
    assert {counters.steps for counters in seen.counters} == {25}
    assert {counters.gradients for counters in seen.counters} == {75}
    assert 0 < max(counters.max_staleness for counters in seen.counters) <= 3


def test_validation_sees_every_gradient() -> None:
    """SGD without momentum at a constant rate: each gradient counts 1 / N, in whatever order."""

    class Linear(Tiny):
        def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
            return self.network(batch[0]).sum() * 0 + self.network[0].bias.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    strategy = AsyncSGDStrategy(backend="in_process", staleness_bound=4, staleness_lr=None)
    module = Linear()
    expected = module.network[0].bias.detach() - 0.5 * 8
    trainer_of(4, 8, 4, strategy=strategy, callbacks=[SlowRank()]).fit(
        module, datamodule=tiny_run(4, 8)
    )
    torch.testing.assert_close(module.network[0].bias.detach(), expected)


def saved(file: Path, num_ranks: int, optimizer: str = "adamw") -> dict[str, Any]:
    """Save after step 5 of 9."""
    callbacks = [SlowRank(), SaveAt(file, 5)]
    trainer_of(num_ranks, 9, 3, callbacks=callbacks).fit(
        Scheduled(optimizer), datamodule=tiny_run(num_ranks, 9)
    )
    return torch.load(file, weights_only=True)


def test_one_rank_resumes_with_the_same_bits(tmp_path: Path) -> None:
    file, full, resumed = tmp_path / "five.ckpt", Scheduled("adamw"), Scheduled("adamw")
    data = tiny_run(1, 5)
    trainer_of(1, 9, 3, max_epochs=2, callbacks=[SaveAt(file, 5)]).fit(full, datamodule=data)
    trainer_of(1, 9, 3, max_epochs=2).fit(resumed, datamodule=data, ckpt_path=file)
    assert_same_weights(weights_of(resumed), weights_of(full), rtol=0, atol=0)


@pytest.mark.few_cases(2)
@pytest.mark.filterwarnings("ignore:The checkpoint was saved after 60 samples of an epoch")
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_checkpoint_is_full_and_other_numbers_of_ranks_resume_it(
    num_ranks: int, tmp_path: Path
) -> None:
    file = tmp_path / "five.ckpt"
    checkpoint = saved(file, 3)
    state = checkpoint["optimizer_states"][0]["state"]
    for index, param in enumerate(Tiny().parameters()):
        assert state[index]["exp_avg"].shape == param.shape
        assert 5 <= state[index]["step"] <= 3 * 5  # updates by one gradient up to three
    plain = Tiny()
    plain.load_state_dict(checkpoint["state_dict"])

    class First(L.Callback):
        weights: Weights

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            First.weights = weights_of(pl_module)

    resumed = Scheduled("adamw")
    trainer = trainer_of(num_ranks, 8, 2, callbacks=[First()], max_epochs=3)
    trainer.fit(resumed, datamodule=tiny_run(num_ranks, 8), ckpt_path=file)
    assert_same_weights(First.weights, weights_of(plain), rtol=0, atol=0)
    assert trainer.global_step == 8
    after = trainer.optimizers[0].state_dict()["state"]
    steps = [int(entry["step"]) for entry in after.values()]
    assert min(steps) >= int(state[0]["step"]) + (3 if num_ranks == 1 else 1)


@pytest.mark.filterwarnings("ignore:The checkpoint was saved after 60 samples of an epoch")
def test_a_synchronous_strategy_resumes_it(tmp_path: Path) -> None:
    file, resumed = tmp_path / "five.ckpt", Scheduled("adamw")
    saved(file, 3)
    strategy = ZeRO1Strategy(backend="in_process")
    trainer = trainer_of(2, 8, 0, strategy=strategy)
    trainer.fit(resumed, datamodule=tiny_run(2, 8), ckpt_path=file)
    assert trainer.global_step == 8


def test_logging_over_ranks_in_training_steps_is_no_deadlock() -> None:
    """A collective in each step makes ranks wait for each other, and nothing else."""

    class Logging(Tiny):
        def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
            loss = super().training_step(batch)
            if batch_idx % 3 == 0:
                self.log("loss", loss, sync_dist=True)
            return loss

    trainer_of(3, 12, 1, callbacks=[SlowRank()]).fit(Logging(), datamodule=tiny_run(3, 12))


def test_a_second_fit_starts_anew() -> None:
    module = Tiny()
    for _ in range(2):
        trainer = trainer_of(2, 4, 2)
        trainer.fit(module, datamodule=tiny_run(2, 4))
        assert trainer.strategy.counters.steps == 4


class Unfreezing(Tiny):
    """Its second layer is frozen up to a batch, or an epoch, of a number."""

    def __init__(self, batch: int = -1, epoch: int = -1) -> None:
        super().__init__()
        self.batch, self.epoch = batch, epoch
        self.network[2].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            self.network[2].requires_grad_(True)

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        if batch_idx == self.batch:
            self.network[2].requires_grad_(True)
        return super().training_step(batch)


def test_what_is_frozen_does_not_travel_until_an_epoch_unfreezes_it() -> None:
    def sent_by(module: Tiny) -> int:
        trainer = trainer_of(2, 8, 2, max_epochs=2, callbacks=[traffic := Sent(), SlowRank()])
        trainer.fit(module, datamodule=tiny_run(2, 4))
        return traffic.bytes

    class Sent(L.Callback):
        bytes = 0

        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.bytes = trainer.strategy.message_traffic["send"].bytes

    frozen, unfrozen = Unfreezing(), Unfreezing(epoch=1)
    second = Tiny().network[2].weight
    few, more, all_of_it = sent_by(frozen), sent_by(unfrozen), sent_by(Tiny())
    assert few < more < all_of_it
    assert torch.equal(frozen.network[2].weight, second)
    assert not torch.equal(unfrozen.network[2].weight, second)
    with pytest.raises(ConfigError, match=r"'network.2.\w+' was unfrozen between two steps"):
        sent_by(Unfreezing(batch=2))


# --- errors --------------------------------------------------------------------------------------


LOSS_SCALING = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


class ByHand(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Matrices(Tiny):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters())


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (ByHand, {}, "ByHand optimizes by hand"),
        (Matrices, {}, "Adafactor does not update each element by itself"),
        (Tiny, {"plugins": [LOSS_SCALING]}, "ranks are at different steps; expected another prec"),
        (Validated, {"sync_batchnorm": True}, "sync_batchnorm=True makes ranks wait"),
        (Tiny, {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging would average"),
        (Tiny, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging would"),
    ],
)
def test_what_cannot_be_is_refused(
    module: type[L.LightningModule], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(2, 2, 2, **options).fit(module(), datamodule=tiny_run(2, 2))


@pytest.mark.parametrize("bound", [-1, 1.5, "4"])
def test_a_bound_is_a_number_of_steps(bound: Any) -> None:
    with pytest.raises(ConfigError, match="staleness_bound must be a"):
        AsyncSGDStrategy(staleness_bound=bound)


def test_a_rule_is_one_of_these() -> None:
    with pytest.raises(ConfigError, match=r"staleness_lr must be 'inverse' or None, .* got 'half'"):
        AsyncSGDStrategy(staleness_lr="half")  # type: ignore[arg-type]


class Failing(Tiny):
    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("a batch that cannot be")
        return super().training_step(batch)


def test_a_rank_that_fails_is_what_the_caller_sees() -> None:
    with pytest.raises(ValueError, match="a batch that cannot be"):
        trainer_of(3, 9, 2).fit(Failing(), datamodule=tiny_run(3, 9))


NUM_RANKS = 3


def trained(strategy: Any, num_steps: int, ckpt_path: Path | None = None, **more: Any) -> Tiny:
    module = Tiny()
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "limit_val_batches": 0} | more
    trainer = quiet_trainer(
        strategy=strategy, devices=NUM_RANKS, max_steps=num_steps, max_epochs=2, **options
    )
    data = TinyData(tiny_data(NUM_RANKS * BATCH * 8))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def asynchronous(warmup_steps: int) -> AsyncSGDStrategy:
    return AsyncSGDStrategy(backend="in_process", staleness_bound=3, warmup_steps=warmup_steps)


@pytest.mark.parametrize("warmup_steps", [6, 7])
def test_a_warm_up_is_synchronous_to_the_bit(warmup_steps: int) -> None:
    strategy = asynchronous(warmup_steps)
    module = trained(strategy, 6, gradient_clip_val=0.2)
    plain = trained(ZeRO1Strategy(backend="in_process"), 6, gradient_clip_val=0.2)
    assert_same_weights(weights_of(module), weights_of(plain), rtol=0, atol=0)
    assert strategy.counters.steps == 0


def test_after_the_warm_up_ranks_train_by_themselves() -> None:
    strategy = asynchronous(5)
    trained(strategy, 12)  # past the end of an epoch of 8
    assert strategy.counters.steps == 7
    assert strategy.counters.gradients == 7 * NUM_RANKS


@pytest.mark.parametrize(("saved_at", "num_asynchronous"), [(3, 7), (8, 4)])
def test_a_warm_up_counts_the_steps_of_the_full_one_run(
    saved_at: int, num_asynchronous: int, tmp_path: Path
) -> None:
    """A run that is resumed within its warm-up ends it; one that is resumed later has none."""
    file = tmp_path / "saved.ckpt"
    trained(asynchronous(5), saved_at, callbacks=[SaveAt(file, saved_at)])
    strategy = asynchronous(5)
    trained(strategy, 12, ckpt_path=file)
    assert strategy.counters.steps == num_asynchronous


@pytest.mark.parametrize("warmup_steps", [-1, 2.5, None])
def test_a_warm_up_is_a_number_of_steps(warmup_steps: Any) -> None:
    with pytest.raises(ConfigError, match="warmup_steps must be a"):
        asynchronous(warmup_steps)


def test_weights_move_after_the_warm_up() -> None:
    short, long = trained(asynchronous(5), 5), trained(asynchronous(5), 9)
    for name, value in weights_of(long).items():
        assert not torch.equal(value, weights_of(short)[name])
