"""Local SGD with what else a training does: clipping, number formats, frozen parts, rivals."""

from functools import partial
from itertools import product
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_shard import ConfigError, LocalSGDStrategy
from lightning_shard.data_parallel.compression import Codec, OneBit, PowerSGD, TopK
from lightning_shard.profiling.savings import CompressionRatio
from tests.strategies.local_sgd.local_training import (
    BATCH,
    ByHand,
    OnRanks,
    Tiny,
    TinyData,
    Weights,
    assert_same_weights,
    slow_but,
    tiny_data,
    train_tiny,
    trainer_of,
    weights_of,
)
from tests.strategies.parity import (
    ACCUMULATE,
    CLIP,
    GLOBAL_BATCH,
    GlobalBatches,
    build,
    ignoring,
    quiet_trainer,
)

pytestmark = ignoring()

STEPS = 6


class LastWeights(L.Callback):
    """Each rank's weights after the last step of an epoch, before the last meeting."""

    def __init__(self) -> None:
        self.of_ranks: list[Weights] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        self.of_ranks = trainer.strategy.collectives.all_gather_object(weights)


def format_options(precision: str) -> dict[str, Any]:
    """Return what the Trainer wants; by itself it has no 16-mixed on CPUs."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", slow_but(["16-mixed"], ["32-true", "bf16-mixed", "16-mixed"]))
def test_between_meetings_a_rank_trains_alone(precision: str) -> None:
    """On its own samples, with AdamW, accumulation, clipping and a schedule."""
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP}
    formats = partial(format_options, precision)
    model, last = build("gpt"), LastWeights()
    data = GlobalBatches(model, STEPS)
    never = {"sync_every": 1000}
    trainer_of(2, STEPS, never, callbacks=[last], **options, **formats()).fit(model, data)
    for rank in range(2):
        alone = build("gpt")
        samples = Subset(data.dataset, range(rank, len(data.dataset), 2))
        loader = DataLoader(samples, batch_size=GLOBAL_BATCH // 2)
        one = {"strategy": "shard_ddp_in_process", "max_steps": STEPS}
        one["use_distributed_sampler"] = False
        quiet_trainer(**one, **options, **formats()).fit(alone, loader)
        for name, param in alone.named_parameters():
            got = last.of_ranks[rank][name]  # of 16 bits while it trains
            assert torch.equal(got, param.to(got.dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "compression"),
    slow_but(
        [("bf16-mixed", None)], product(("bf16-mixed", "16-mixed", "bf16-true"), (None, "int8"))
    ),
)
def test_ranks_hold_the_same_bits_when_they_have_met(
    precision: str, compression: str | None
) -> None:
    model, steps = build("gpt"), OnRanks()
    options = {"sync_every": 3, "outer_optimizer": "nesterov", "compression": compression}
    trainer = trainer_of(3, STEPS, options, callbacks=[steps], **format_options(precision))
    trainer.fit(model, datamodule=GlobalBatches(model, STEPS))
    for step in range(STEPS):
        first, second = steps.of_ranks[0][step], steps.of_ranks[2][step]
        equal = all(torch.equal(one, second[name]) for name, one in first.items())
        assert equal == ((step + 1) % 3 == 0)


def test_statistics_of_batch_norms_are_averaged_when_ranks_meet() -> None:

    def statistics_after_four_steps(sync_every: int) -> list[Tensor]:
        model, steps = build("conv"), OnRanks()
        trainer = trainer_of(2, 4, {"sync_every": sync_every}, callbacks=[steps])
        trainer.fit(model, datamodule=GlobalBatches(model, 4))
        return [steps.of_ranks[rank][3]["body.1.running_mean"] for rank in range(2)]

    apart, met = statistics_after_four_steps(5), statistics_after_four_steps(4)
    assert not torch.equal(*apart)
    assert torch.equal(*met)
    torch.testing.assert_close(met[0], (apart[0] + apart[1]) / 2)


@pytest.mark.parametrize("steps_alone", [0, 1])
def test_statistics_of_the_warm_up_are_the_same_when_ranks_part(steps_alone: int) -> None:
    """Those of its last step were each rank's own, and a validation found them."""
    model, watch = build("conv"), OnRanks()
    options = {"warmup_steps": 4, "sync_every": 2}
    trainer = trainer_of(2, 4 + steps_alone, options, callbacks=[watch])
    trainer.fit(model, datamodule=GlobalBatches(model, 4 + steps_alone))
    name = "body.1.running_mean"
    last = [watch.of_ranks[rank][3][name] for rank in range(2)]
    assert torch.equal(*last)


class Teacher(Tiny):
    """A frozen copy follows the network by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 4).double().requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.weight.data.lerp_(self.network[0].weight.data, 0.5)


@pytest.mark.parametrize("outer", [None, "nesterov"])
def test_a_frozen_teacher_is_averaged_with_the_rest(outer: str | None) -> None:
    way, _ = train_tiny(2, 5, module=Teacher(), sync_every=4, outer_optimizer=outer)
    # `way` has the values before `on_train_batch_end`: the teacher follows, then they meet
    last = [way.of_ranks[rank][2] for rank in range(2)]
    teachers = [w["teacher.weight"].lerp(w["network.0.weight"], 0.5) for w in last]
    assert not torch.equal(*teachers)
    for rank in range(2):
        met = way.of_ranks[rank][3]["teacher.weight"]
        torch.testing.assert_close(met, (teachers[0] + teachers[1]) / 2, rtol=1e-12, atol=0.0)


class Unfrozen(Tiny):
    """The first layer joins after three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.network[0].requires_grad_(batch_idx >= 3)


def test_what_is_unfrozen_joins_the_outer_optimizer() -> None:
    way, _ = train_tiny(2, 9, module=Unfrozen(), sync_every=2, outer_optimizer="nesterov")
    expected = ByHand.of(2, Tiny())
    first, second = (
        [name for name in expected.common if name.startswith(f"network.{n}")] for n in (0, 2)
    )
    for copy in expected.copies:
        copy.network[0].requires_grad_(False)
    for step in range(9):
        for copy in expected.copies:
            copy.network[0].requires_grad_(step >= 3)
        expected.step(step)
        if step % 2:
            for name in second + (first if step > 3 else []):
                expected.set(name, expected.outer_step(name, expected.outer_gradient(name)))
        if step == 3:  # they meet for the first time
            expected.average(first)
            expected.common |= {n: weights_of(expected.copies[0])[n] for n in first}
        for rank, copy in enumerate(expected.copies):
            assert_same_weights(way.of_ranks[rank][step], dict(copy.state_dict()))


class Rivals(Tiny):
    """Two optimizers that take turns, stepped by hand."""

    def __init__(self, use_pl_optimizer: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.use_pl_optimizer = use_pl_optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> None:
        for optimizer in self.optimizers(use_pl_optimizer=self.use_pl_optimizer):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.network[::2]]


def test_steps_of_all_optimizers_count() -> None:
    way, _ = train_tiny(2, 8, module=Rivals(), sync_every=4)  # two batches
    met = [
        all(torch.equal(one, way.of_ranks[1][batch][name]) for name, one in weights.items())
        for batch, weights in enumerate(way.of_ranks[0])
    ]
    assert met == [False, True, False, True]


def test_a_step_past_the_trainer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="went past the Trainer"):
        train_tiny(2, 2, module=Rivals(use_pl_optimizer=False))


class Same(Codec):
    """Compresses nothing."""

    error_feedback = True

    def encode(self, values: Tensor, turn: Any) -> list[Tensor]:
        return [values]

    def decode(self, fields: Any, numel: int) -> Tensor:
        return fields[0].clone()


@pytest.mark.slow
@pytest.mark.parametrize("outer", slow_but(["nesterov"], [None, "nesterov"]))
def test_what_travels_can_be_compressed(outer: str | None) -> None:
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "overlap_steps": 2}
    options |= {"outer_optimizer": outer}
    _, dense = train_tiny(3, 12, **options)
    _, exact = train_tiny(3, 12, **options, compression=Same())
    assert_same_weights(exact, dense, rtol=1e-5, atol=1e-6)
    _, lossy = train_tiny(3, 12, **options, compression=TopK(ratio=0.25))
    with pytest.raises(AssertionError):
        assert_same_weights(lossy, dense, rtol=1e-5, atol=1e-6)


def test_an_outer_optimizer_from_a_config_or_a_function() -> None:
    config = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.7, "momentum": 0.9}}
    config["init_args"]["nesterov"] = True  # type: ignore[index]
    weights = [
        train_tiny(2, 5, sync_every=2, outer_optimizer=outer)[1]
        for outer in ("nesterov", config, lambda params: torch.optim.Adam(params, lr=0.01))
    ]
    assert_same_weights(weights[0], weights[1])
    with pytest.raises(AssertionError):
        assert_same_weights(weights[0], weights[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every must be a whole number of at least 1, such as 10, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
        ({"sync_every": 2, "fragments": 3}, "at most one fragment per step"),
        ({"sync_every": 2, "overlap_steps": 2}, "has to land before it is sent again"),
        ({"mixing": 1.0}, "mixing must be .* got 1.0"),
        ({"outer_optimizer": "nestrov"}, "outer_optimizer must be .*, got 'nestrov'"),
        ({"outer_optimizer": {"class_path": "torch.optim.SDG"}}, "is not to be found"),
        ({"outer_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"l": 1}}}, "be made"),
        ({"outer_optimizer": lambda params: None}, "expected a torch optimizer"),
        ({"compression": "int9"}, "compression must be a string that is one of 'none', 'fp16'"),
        ({"compression": TopK(momentum=0.9)}, "the outer optimizer has a momentum"),
        ({"compression": OneBit()}, "the outer optimizer has a momentum"),
        (
            {"compression": PowerSGD(warmup_steps=5, adam=True)},
            "the outer optimizer has a momentum",
        ),
        ({"sync_evry": 2}, "Did you mean 'sync_every'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSGDStrategy(**options)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm=True makes ranks wait"),
        ({"callbacks": [WeightAveraging()]}, "WeightAveraging would average"),
        ({"callbacks": [StochasticWeightAveraging(1e-2)]}, "StochasticWeightAveraging would"),
    ],
)
def test_trainers_that_cannot_be(more: dict[str, Any], message: str) -> None:
    trainer = trainer_of(2, 2, {}, **more)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Tiny(), datamodule=TinyData(tiny_data(2 * BATCH * 2)))


def test_more_fragments_than_parameters() -> None:
    with pytest.raises(ConfigError, match="the model has 4 parameters"):
        train_tiny(2, 2, sync_every=5, fragments=5)


class Overflow(Tiny):
    """On rank 1 the third loss is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.network.float()

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        loss = super().training_step([part.float() for part in batch])
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 2 else loss


def test_all_ranks_skip_a_step_that_overflows_on_one() -> None:
    steps, module = OnRanks(), Overflow()
    trainer = trainer_of(2, 4, {"sync_every": 4}, callbacks=[steps], **format_options("16-mixed"))
    trainer.fit(module, datamodule=TinyData(tiny_data(2 * BATCH * 4)))
    for way in steps.of_ranks:
        for name, before in way[1].items():
            assert torch.equal(way[2][name], before)
    assert all(torch.isfinite(value).all() for value in weights_of(module).values())


class Held(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.held = trainer.strategy.held_bytes()


def test_the_outer_optimizer_counts_as_held() -> None:
    held = [Held(), Held()]
    data = TinyData(tiny_data(2 * BATCH * 4))
    for one, outer in zip(held, (None, "nesterov"), strict=True):
        options = {"sync_every": 4, "outer_optimizer": outer}
        trainer_of(2, 4, options, callbacks=[one]).fit(Tiny(), datamodule=data)
    more = held[1].held.optimizer_state - held[0].held.optimizer_state
    assert more == 2 * 26 * 8  # common values and their momentum


def test_the_ratio_of_compression_can_be_shown() -> None:
    module, ratio = Tiny(), CompressionRatio()
    trainer = trainer_of(2, 4, {"sync_every": 2, "compression": "fp16"}, callbacks=[ratio])
    trainer.fit(module, datamodule=TinyData(tiny_data(2 * BATCH * 4)))
    assert trainer.callback_metrics["compression"] > 1.0  # much of this small message is padding


def test_the_names_of_the_registry() -> None:
    for name in ("local_sgd", "local_sgd_in_process", "local_sgd_gloo", "local_sgd_mpi"):
        trainer = quiet_trainer(strategy=name)
        assert isinstance(trainer.strategy, LocalSGDStrategy)
