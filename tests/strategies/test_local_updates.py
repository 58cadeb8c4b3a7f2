"""Ranks that train by themselves meet, and validate, when the strategy says so."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_shard import AsyncSGDStrategy, ConfigError, LocalSGDStrategy
from lightning_shard.data_parallel.async_sgd.async_sgd import AsyncCounters
from tests.checkpoint.saved_sections import own_parameters_in
from tests.strategies.async_sgd.test_async_sgd import SlowRank
from tests.strategies.local_sgd.local_training import (
    BATCH,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    tiny_data,
    weights_of,
)
from tests.strategies.local_updates import STRATEGIES, fit
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring("You're resuming from a checkpoint that ended before")


# --- Lightning's broadcast at every batch --------------------------------------------------------


class Counters(L.Callback):
    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.of_ranks: list[AsyncCounters] = strategy.collectives.all_gather_object(
            strategy.counters
        )


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_rank_does_not_hold_the_others_up_before_the_bound(slow: int) -> None:
    """A slow rank held the others up at every batch long before the bound."""
    counters = Counters()
    callbacks = [SlowRank(slow, turns=200), counters]
    fit(STRATEGIES["async"](), Tiny(), 3, 20, callbacks=callbacks)
    others = [one for rank, one in enumerate(counters.of_ranks) if rank != slow]
    assert max(one.max_staleness for one in others) == 3
    assert all(one.waits > 0 for one in others)
    assert {one.steps for one in counters.of_ranks} == {20}


def test_nothing_is_broadcast_in_steps_of_local_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something was broadcast in every step of local SGD."""
    steps_of_calls: list[int] = []
    broadcast = dist.broadcast

    class Listening(Tiny):
        def on_train_start(self) -> None:
            def counted(*args: Any, **kwargs: Any) -> Any:
                steps_of_calls.append(self.trainer.global_step)
                return broadcast(*args, **kwargs)

            monkeypatch.setattr(dist, "broadcast", counted)

        def on_train_end(self) -> None:
            monkeypatch.setattr(dist, "broadcast", broadcast)

    fit(LocalSGDStrategy(backend="in_process", sync_every=4), Listening(), 2, 8)
    assert not any(steps_of_calls)  # the first step agrees on an order for all


class Terminated(L.Callback):
    """Rank 0 finds after its third step that SIGTERM has come."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, idx: int
    ) -> None:
        if trainer.global_rank == 0 and idx == 2:
            connector: Any = trainer._signal_connector
            connector.received_sigterm = True


@pytest.mark.parametrize("way", STRATEGIES)
def test_sigterm_still_ends_all_ranks_of_a_process(way: str) -> None:
    with pytest.raises(SIGTERMException):
        fit(STRATEGIES[way](), Tiny(), 3, 20, callbacks=[SlowRank(2), Terminated()])


def test_the_loops_are_lightnings_after_a_fit() -> None:
    for make in STRATEGIES.values():
        loop = fit(make(), Tiny(), 2, 2).fit_loop.epoch_loop
        assert not {"_broadcast_sigterm_tensor", "run"} & vars(loop).keys()
        assert "run" not in vars(loop.val_loop)


# --- epochs that end early -----------------------------------------------------------------------


class CutShort(Tiny):
    """Its epochs end at the sixth batch, without a step; the second one trains all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.network[2].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.network[2].requires_grad_(self.current_epoch > 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


class AtEpochEnds(L.Callback):
    def __init__(self) -> None:
        self.of_ranks: list[list[Weights]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.of_ranks.append(strategy.collectives.all_gather_object(weights_of(pl_module)))


def test_an_async_epoch_that_is_cut_short_ends_in_agreement() -> None:
    """An async epoch that was cut short ended without agreement."""
    ends = AtEpochEnds()
    trainer = quiet_trainer(
        strategy=STRATEGIES["async"](),
        devices=2,
        max_steps=-1,
        max_epochs=2,
        limit_val_batches=0,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        callbacks=[SlowRank(), ends],
    )
    trainer.fit(CutShort(), datamodule=TinyData(tiny_data(2 * BATCH * 8)))
    assert trainer.global_step == 10
    assert len(ends.of_ranks) == 2
    for one, other in ends.of_ranks:
        assert_same_weights(one, other, rtol=0, atol=0)


# --- the end of a fit ----------------------------------------------------------------------------


class AtTheEnd(L.Callback):
    """What ranks hold in the last hook, what has been saved there, and what has been sent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.of_ranks: list[Weights] = strategy.collectives.all_gather_object(weights_of(pl_module))
        trainer.save_checkpoint(self.path)
        self.sent_bytes = strategy.compression_tally().sent_bytes


@pytest.mark.parametrize("way", STRATEGIES)
def test_at_the_end_of_a_fit_hooks_see_the_same_weights_on_all_ranks(
    way: str, tmp_path: Path
) -> None:
    """At the end of a fit hooks saw each rank's own weights."""
    ends = AtTheEnd(tmp_path / "end.ckpt")
    module = Tiny()
    trainer = fit(STRATEGIES[way](), module, 2, 7, callbacks=[ends])
    first, second = ends.of_ranks
    assert_same_weights(first, second, rtol=0, atol=0)
    assert_same_weights(first, weights_of(module), rtol=0, atol=0)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    kept, after = (torch.load(tmp_path / f"{name}.ckpt") for name in ("end", "after"))
    assert_same_weights(kept["state_dict"], after["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(kept["optimizer_states"], after["optimizer_states"], rtol=0, atol=0)


def test_what_local_sgd_has_sent_is_told_after_the_end(tmp_path: Path) -> None:
    """What local SGD had sent was forgotten at the end."""
    ends = AtTheEnd(tmp_path / "end.ckpt")
    strategy = LocalSGDStrategy(backend="in_process", sync_every=3, compression="fp16")
    trainer = fit(strategy, Tiny(), 2, 7, callbacks=[ends])
    assert trainer.strategy.compression_tally().sent_bytes == ends.sent_bytes > 0


# --- the end of a warm-up ------------------------------------------------------------------------


class UsedAtFirst(Tiny):
    """Has a layer that steps use up to a number, and gradients that are zeroed in place."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(3, 2).double()
        self.num_steps = num_steps

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        loss = super().training_step(batch)
        unused = batch_idx >= self.num_steps
        return loss if unused else loss + self.extra(batch[0]).pow(2).mean()

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_gradients_of_the_warm_up_do_not_stay_for_the_first_step_alone() -> None:
    """They are shards of the average, in which the rank's own gradient has no place."""
    strategy = AsyncSGDStrategy(backend="in_process", staleness_bound=2, warmup_steps=3)
    module = UsedAtFirst(3)
    fit(strategy, module, 2, 8, callbacks=[SlowRank()])
    assert bool(module.extra.weight.isfinite().all())


class TwoNetworks(Tiny):
    """Optimizes by hand, each layer in its turn while the other one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(Tiny.training_step(self, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        network: Any = self.network
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in network[::2]]


class KnownToAll(L.Callback):
    """Names of what the outer optimizer has at the end of each batch."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if strategy.rounds.local is not None:
            self.names.append(set(strategy.rounds.local.rule.common))


@pytest.mark.parametrize("warmup_steps", [1, 2])
def test_a_warm_up_that_ends_inside_a_toggle_leaves_no_network_out_of_diloco(
    warmup_steps: int,
) -> None:
    """A warm-up that ended inside a toggle left a network out of DiLoCo."""
    strategy = LocalSGDStrategy(
        backend="in_process",
        sync_every=4,
        fragments=3,
        warmup_steps=warmup_steps,
        outer_optimizer="nesterov",
        bucket_mb=1e-5,
    )
    module, known = TwoNetworks(), KnownToAll()
    fit(strategy, module, 2, 14, callbacks=[known])
    everything = {name for name, _ in module.named_parameters()}
    assert known.names == [everything] * 6


# --- configuration errors ------------------------------------------------------------------------


class StepsTaken(L.Callback):
    num_steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        StepsTaken.num_steps += 1


class Complex(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class NoRate(Tiny):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        class Fixed(torch.optim.SGD):
            def __init__(self, params: Any) -> None:
                super().__init__(params)
                for group in self.param_groups:
                    del group["lr"]

        return Fixed(self.parameters())


@pytest.mark.parametrize(
    ("strategy", "module", "message"),
    [
        (
            LocalSGDStrategy(backend="in_process", sync_every=9, fragments=9, warmup_steps=2),
            Tiny,
            "fragments=9, but the model has 4 parameters",
        ),
        (
            LocalSGDStrategy(backend="in_process", compression="int8", warmup_steps=2),
            Complex,
            "'phase' is of torch.complex64, but compression is for real numbers",
        ),
        (
            AsyncSGDStrategy(backend="in_process", staleness_bound=2, warmup_steps=2),
            NoRate,
            "Fixed has a group without a learning rate",
        ),
    ],
)
def test_mistakes_show_before_the_warm_up(strategy: Any, module: type[Tiny], message: str) -> None:
    """Mistakes showed only when the warm-up had ended."""
    StepsTaken.num_steps = 0
    with pytest.raises(ConfigError, match=message):
        fit(strategy, module(), 2, 6, callbacks=[StepsTaken()])
    assert StepsTaken.num_steps == 0


def test_fragments_may_count_what_a_warm_up_still_freezes() -> None:
    class Frozen(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.network[2].requires_grad_(False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.network[2].requires_grad_(batch_idx > 0)

    strategy = LocalSGDStrategy(backend="in_process", sync_every=4, fragments=4, warmup_steps=2)
    assert fit(strategy, Frozen(), 2, 8).global_step == 8


# --- steps that user code leaves out -------------------------------------------------------------


class LeavesOut(Tiny):
    """Leaves out the steps of some batches, on some ranks, and drops their gradients."""

    def __init__(self, batches: set[int], ranks: set[int]) -> None:
        super().__init__()
        self.batches, self.ranks = batches, ranks

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        if batch_idx in self.batches and self.global_rank in self.ranks:
            optimizer.zero_grad()
        else:
            optimizer.step()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("way", STRATEGIES)
def test_one_rank_may_leave_out_a_step(way: str) -> None:
    """The others' exchange waited for it, and under async_sgd the next validation hung."""
    options = {"limit_val_batches": 1, "val_check_interval": 4, "num_sanity_val_steps": 0}
    for batches in ({2, 5}, {3}, {7}):  # at a meeting, before a validation, at the end
        module = LeavesOut(batches, {0})
        trainer = fit(STRATEGIES[way](), module, 2, 8, **options)
        assert trainer.global_step == 8
        assert all(value.isfinite().all() for value in weights_of(module).values())


def test_a_step_that_is_left_out_counts_for_nothing_under_async_sgd() -> None:
    """Of two ranks of equal samples one alone steps: by its gradient, at half the rate."""

    class Same(LeavesOut):
        def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
            return self.network[0].bias.sum() + self.network(batch[0]).sum() * 0

    ends = []
    for leaves in (set[int](), {1}):
        module = Same({0, 1, 2, 3}, leaves)
        module.momentum = 0.0
        before = module.network[0].bias.detach().clone()
        fit(STRATEGIES["async"](), module, 2, 4)
        ends.append(before - module.network[0].bias.detach())
    torch.testing.assert_close(ends[0], torch.full_like(ends[0], 0.4))
    torch.testing.assert_close(ends[1], torch.full_like(ends[1], 0.2))


@pytest.mark.parametrize("way", ["average", "diloco"])
def test_a_resumed_fit_meets_at_the_same_steps_after_steps_were_left_out(
    way: str, tmp_path: Path
) -> None:
    """Steps were counted by the optimizer's, but resumed from the Trainer's."""

    class SaveAtFive(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "five.ckpt")

    ends = []
    for path, callbacks in ((None, [SaveAtFive()]), (tmp_path / "five.ckpt", [])):
        module, data = LeavesOut({0, 2, 3}, {0, 1}), TinyData(tiny_data(2 * BATCH * 8))
        trainer = quiet_trainer(
            strategy=STRATEGIES[way](),
            devices=2,
            max_steps=8,
            accumulate_grad_batches=1,
            gradient_clip_val=None,
            callbacks=callbacks,
        )
        trainer.fit(module, datamodule=data, ckpt_path=path)
        ends.append(weights_of(module))
    assert_same_weights(*ends, rtol=0, atol=0)


class StepsTwice(Tiny):
    """Rank 1 takes two steps by each gradient, rank 0 one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        for _ in range(1 + self.global_rank):
            optimizer.step()


def test_other_numbers_of_steps_are_told_before_a_rank_waits_for_ever() -> None:
    """A rank that had ended with fewer steps was waited for without end."""
    options = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
    with pytest.raises(ConfigError, match=r"Rank 1 has taken \d steps and rank 0 \d before all"):
        fit(STRATEGIES["async"](), StepsTwice(), 2, 4, **options)


# --- hooks that swap weights for a validation ----------------------------------------------------


class Linear(Tiny):
    """Each gradient moves one bias by the same, in whatever order they are applied."""

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        return self.network(batch[0]).sum() * 0 + self.network[0].bias.sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("swapped", float(bool((self.network[0].weight == 7).all())), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Swap(L.Callback):
    """As an average of the weights over time is put in for a validation, by hand."""

    @torch.no_grad()
    def put_in(self, module: L.LightningModule) -> None:
        self.backup = [param.detach().clone() for param in module.parameters()]
        for param in module.parameters():
            param.fill_(7.0)

    @torch.no_grad()
    def take_out(self, module: L.LightningModule) -> None:
        for param, value in zip(module.parameters(), self.backup, strict=True):
            param.copy_(value)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.put_in(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.take_out(pl_module)


class SwappedByItself(Linear):
    """In the first hook of a validation, and in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.swap = Swap()

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.swap.put_in(self)

    def on_validation_model_train(self) -> None:
        self.train()
        self.swap.take_out(self)


class TwoLoaders(TinyData):
    def val_dataloader(self) -> Any:
        return [super(TwoLoaders, self).val_dataloader() for _ in range(2)]


VALIDATED = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 1}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("way", STRATEGIES)
def test_weights_swapped_for_a_validation_do_not_go_into_training(way: str) -> None:
    """Weights swapped for a validation went into training."""
    ends = []
    for module, callbacks in ((Linear(), []), (Linear(), [Swap()]), (SwappedByItself(), [])):
        trainer = quiet_trainer(
            strategy=STRATEGIES[way](),
            devices=2,
            max_steps=7,
            accumulate_grad_batches=1,
            gradient_clip_val=None,
            callbacks=[SlowRank(turns=60), *callbacks],
            **VALIDATED,
        )
        trainer.fit(module, datamodule=TwoLoaders(tiny_data(2 * BATCH * 7)))
        ends.append(weights_of(module))
        swapped = [float(value) for value in trainer.callback_metrics.values()]
        assert swapped == [float(len(ends) > 1)] * 2
    plain, *others = ends
    for other in others:
        assert_same_weights(other, plain)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("way", STRATEGIES)
def test_a_checkpoint_of_a_validation_with_swapped_weights_is_one_without(
    way: str, tmp_path: Path
) -> None:
    saved = []
    for name, callbacks in (("plain", []), ("swapped", [Swap()])):
        folder = tmp_path / name
        saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
        more = {"callbacks": [*callbacks, saver], "enable_checkpointing": True}
        fit(STRATEGIES[way](), Linear(), 2, 5, **more, **VALIDATED)
        files = sorted(folder.glob("*.ckpt"))
        saved.append([torch.load(file, weights_only=True) for file in files])
    assert [one["global_step"] for one in saved[0]] == [2, 4]
    for plain, swapped in zip(*saved, strict=True):
        assert_same_weights(swapped["state_dict"], plain["state_dict"])
        if way == "diloco":
            own = [own_parameters_in(one["lightning_shard"]) for one in (swapped, plain)]
            assert_same_weights(*own)
            assert own[0].keys() == plain["state_dict"].keys()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("way", STRATEGIES)
def test_a_validation_after_the_fit_sees_the_fitted_weights(way: str) -> None:
    trainer = fit(STRATEGIES[way](), module := Tiny(), 2, 4, **VALIDATED)
    fitted = weights_of(module)
    (metrics,) = trainer.validate(module, datamodule=TinyData(tiny_data(64)), verbose=False)
    assert metrics["val_loss"] > 0
    assert_same_weights(weights_of(module), fitted, rtol=0, atol=0)


# --- what a validation changes -------------------------------------------------------------------


class Calibrated(Tiny):
    """A validation sets one buffer, and a step another one, differently on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(2))
        self.register_buffer("running", torch.zeros(2))

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        self.running[0] += 1 + self.global_rank
        self.running[1] = float("nan")
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        assert self.running[0] == 3
        self.threshold.fill_(5.0)

    def on_validation_end(self) -> None:
        assert bool((self.threshold == 5).all())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # as they were before the validation
            assert self.running[0] == 2 * (1 + self.global_rank)
            assert bool(self.running[1].isnan())


def test_a_buffer_that_a_validation_has_set_stays() -> None:
    """A buffer that a validation had set was set back."""
    strategy = LocalSGDStrategy(backend="in_process", sync_every=10)
    module = Calibrated()
    fit(strategy, module, 2, 3, **VALIDATED | {"num_sanity_val_steps": 0})
    assert module.threshold.tolist() == [5.0, 5.0]
