"""What runs with shared experts count, refuse and leave behind."""

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy
from lightning_shard.profiling import ExpertBalance
from tests.expert_parallel.models import EXPERT_MODELS, Listed, ListedMixture, Seldom
from tests.strategies.expert_parallel.test_parity import build, single_device
from tests.strategies.parity import (
    LONG_STEPS,
    SMALL_BUCKET_MB,
    GlobalBatches,
    assert_parity,
    ignoring,
    quiet_trainer,
    train,
)

pytestmark = ignoring()


def sharing(num_parts: int = 2, **options: Any) -> HybridParallelStrategy:
    backend = options.pop("backend", "in_process")
    return HybridParallelStrategy(
        backend=backend, expert_parallel_size=num_parts, announce=False, **options
    )


def fit(model: Any, strategy: Any, num_ranks: int = 2, num_steps: int = 2, **options: Any) -> Any:
    trainer = quiet_trainer(strategy=strategy, devices=num_ranks, max_steps=num_steps, **options)
    trainer.fit(model, datamodule=GlobalBatches(model, num_steps))
    return trainer


RECOMPUTED = [
    (model, stage, kind)
    for model in ("mixtral", "seldom", "listed", "deepseek_v3")
    for stage in (1, 3)
    for kind in ("full", "selective")
]
QUICK = {("mixtral", 3, "full"), ("seldom", 1, "selective")}


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "stage", "kind"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in RECOMPUTED],
)
def test_recomputed_mixtures_equal_a_single_device(model: str, stage: int, kind: Any) -> None:
    strategy = sharing(zero_stage=stage, activation_checkpointing=kind, bucket_mb=SMALL_BUCKET_MB)
    run = train(build(model), strategy=strategy, devices=2, num_steps=LONG_STEPS)
    assert_parity(run, single_device(model), num_steps=LONG_STEPS)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("model", ["mixtral", "listed"])
def test_mixed_precision_differs_by_rounding(model: str) -> None:
    run = train(build(model), strategy=sharing(zero_stage=2), devices=2, precision="bf16-mixed")
    expected = train(build(model), precision="bf16-mixed")
    torch.testing.assert_close(
        torch.tensor(run.losses), torch.tensor(expected.losses), rtol=2e-2, atol=0.0
    )


class Balanced(ExpertBalance):
    """Keeps what is logged."""

    logged: tuple[float, ...] = ()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if self.name in trainer.callback_metrics:
            self.logged += (trainer.callback_metrics[self.name].item(),)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {}),
        (4, {}),
        (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
        (4, {"tensor_parallel_size": 2}),
        (2, {"activation_checkpointing": "full"}),
    ],
)
def test_the_load_counts_every_token_of_every_rank(num_ranks: int, options: dict[str, Any]) -> None:
    model, strategy, balance = Listed(), sharing(**options), Balanced(every_n_steps=1)
    num_steps = 2
    trainer = fit(
        model,
        strategy,
        num_ranks,
        num_steps,
        callbacks=[balance],
        enable_progress_bar=False,
        accumulate_grad_batches=1,
    )
    load = strategy.expert_load()
    assert list(load) == ["blocks.0.1.experts", "blocks.1.1.experts"]
    num_words = model.data(12)[0][0].numel() * 12 * num_steps
    num_calls = num_steps * options.get("num_microbatches", 1)
    for one in load.values():
        assert sum(one.tokens) == 2 * num_words  # the best two of each word
        assert one.num_calls == num_calls
        assert 0 < one.sent_away < 1
        assert 1 <= one.imbalance <= 4
    assert balance.logged
    assert trainer.callback_metrics["expert_imbalance"] >= 1


def with_mixture(make: Callable[[int], nn.Module]) -> Listed:
    model = Listed()
    model.blocks[1] = nn.Sequential(nn.LayerNorm(16), make(16))
    return model


def with_adafactor(model: Any) -> Any:
    """Return a model that is trained by an optimizer of whole matrices."""
    model.configure_optimizers = lambda: torch.optim.Adafactor(model.parameters(), lr=1e-3)
    return model


def test_optimizers_of_matrices_update_whole_experts() -> None:
    """With a list, and all state on each rank, an expert is whole where it is."""
    weights = []
    for num_ranks, strategy in ((1, "auto"), (2, sharing(zero_stage=0))):
        torch.manual_seed(7)
        model = with_adafactor(Listed())
        fit(model, strategy, num_ranks, accumulate_grad_batches=1)
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def test_evaluations_and_predictions_equal_a_single_device() -> None:
    losses = []
    for options in ({"strategy": sharing(), "devices": 2}, {}):
        model = build("listed")
        model.predict_step = lambda batch, _, model=model: model.loss(batch)
        found = quiet_trainer(**options).predict(model, DataLoader(model.data(4), batch_size=1))
        assert found is not None
        losses.append(torch.stack([one.detach() for one in found]))
    torch.testing.assert_close(losses[0], losses[1])


def test_a_jittered_router_draws_once() -> None:
    """A rehearsal and the forward see one draw, and what follows draws what a plain run would."""
    draws: list[list[float]] = []

    class Jittered(ListedMixture):
        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.empty_like(x).uniform_(0.99, 1.01) if self.training else x
            result = super().forward(x)
            draws[-1].append(torch.rand(()).item())
            return result

    runs = []
    for num_ranks, strategy in ((1, "auto"), (2, sharing())):
        draws.append([])
        torch.manual_seed(7)
        model = with_mixture(lambda width: Jittered(width, 4))
        trainer = fit(model, strategy, num_ranks, 1, accumulate_grad_batches=1)
        runs.append(trainer.callback_metrics)
    assert len(draws[0]) == 1
    assert all(0 <= one < 1 for one in draws[1])


class Seen(L.Callback):
    """Reads weights and gradients where users do."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.sums: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for param in pl_module.parameters():
            self.norms.append(-1.0 if param.grad is None else param.grad.norm().item())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.sums += [param.double().sum().item() for param in pl_module.parameters()]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("name", "stage"), [("listed", 0), ("listed", 2), ("mixtral", 1), ("mixtral", 3)]
)
def test_hooks_see_whole_experts(name: str, stage: int) -> None:
    callbacks = [Seen(), Seen()]
    fit(build(name), "auto", 1, callbacks=callbacks[:1], accumulate_grad_batches=1)
    fit(build(name), sharing(zero_stage=stage), callbacks=callbacks[1:], accumulate_grad_batches=1)
    alone, shared = callbacks
    assert len(shared.sums) == len(alone.sums) > 0
    torch.testing.assert_close(shared.norms, alone.norms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(shared.sums, alone.sums, rtol=1e-4, atol=1e-4)


class Multiplies(L.Callback):
    """Computes with weights and gradients together, and with weights alone."""

    def __init__(self) -> None:
        self.products: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for param in pl_module.parameters():
            if param.grad is not None:
                self.products.append((param.detach() * param.grad).sum().item())
            self.products.append(param.detach().norm().item())


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["listed", "mixtral"])
def test_hooks_that_a_manual_step_calls_see_the_weights_of_one_device(
    name: str, stage: int
) -> None:
    """Ranks without an expert gathered its weight, which the others did not."""
    callbacks = [Multiplies(), Multiplies()]
    for strategy, num_ranks, seen in zip(
        ("auto", sharing(zero_stage=stage)), (1, 4), callbacks, strict=True
    ):
        model = build(name)
        model.automatic_optimization = False
        model.training_step = MethodType(_by_hand, model)
        options = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        fit(model, strategy, num_ranks, callbacks=[seen], **options)
    alone, shared = callbacks
    assert len(alone.products) > 0
    torch.testing.assert_close(shared.products, alone.products, rtol=1e-4, atol=1e-5)


def _by_hand(module: Any, batch: Any, batch_idx: int) -> Tensor:
    optimizer, loss = module.optimizers(), type(module).training_step(module, batch, batch_idx)
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(("name", "stage"), [("listed", 3), ("mixtral", 1)])
def test_averages_of_weights_have_whole_experts(name: str, stage: int) -> None:
    weights = []
    for num_ranks, strategy in ((1, "auto"), (2, sharing(zero_stage=stage))):
        model, average = build(name), EMAWeightAveraging(decay=0.5)
        fit(model, strategy, num_ranks, callbacks=[average], accumulate_grad_batches=1)
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "stage"), [("listed", 3), ("mixtral", 1)])
def test_models_on_meta_start_with_what_they_would_draw(name: str, stage: int) -> None:
    models = []
    for is_empty in (False, True):
        trainer = quiet_trainer(strategy=sharing(zero_stage=stage), devices=2, max_steps=1)
        torch.manual_seed(7)
        with trainer.init_module(empty_init=is_empty):
            models.append(EXPERT_MODELS[name]())
        trainer.fit(models[-1], datamodule=GlobalBatches(models[-1], 1))
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("name", ["listed", "mixtral"])
def test_each_rank_holds_its_share_of_the_experts(name: str) -> None:
    held: list[tuple[int, int]] = []

    class Held(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            slots = [slot for flat in trainer.strategy.engine.flats for slot in flat.layout.slots]
            held.append((trainer.global_rank, sum(slot.numel for slot in slots)))

    model = EXPERT_MODELS[name]()
    numels = {path: one.numel() for path, one in model.named_parameters()}
    experts = sum(numel for path, numel in numels.items() if ".experts." in path)
    fit(model, sharing(4, zero_stage=0), 4, callbacks=[Held()])
    share = sum(numels.values()) - experts + experts // 4
    assert sorted(held) == [(rank, share) for rank in range(4)]


def test_experts_have_their_own_classes_and_values_after_a_fit() -> None:
    model = Seldom()
    fit(model, sharing(), num_steps=1)
    expected = {name: type(one) for name, one in Seldom().named_modules()}
    assert {name: type(one) for name, one in model.named_modules()} == expected
    shapes = {name: one.shape for name, one in Seldom().named_parameters()}
    assert {name: one.shape for name, one in model.named_parameters()} == shapes
    assert set(EXPERT_MODELS) >= {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"}
    assert F.mse_loss(model.blocks[0].experts[0].weight, torch.zeros(16, 16)) > 0


class KeepsCopies(Callback):
    """Copies the network in a hook, on rank 0, and the copy's copy."""

    def __init__(self) -> None:
        self.kept: list[nn.Module] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        first = copy.deepcopy(pl_module.get_submodule("network"))
        self.kept += [first, copy.deepcopy(first)]


def test_copies_from_a_hook_are_of_the_model_s_own_classes_after_the_fit() -> None:
    """The copies of mixtures went on asking the ended run, and could not be pickled."""
    model, keeps = build("mixtral"), KeepsCopies()
    fit(model, sharing(zero_stage=1), callbacks=[keeps])
    kinds = {type(one) for one in model.get_submodule("network").modules()}
    for kept in keeps.kept:
        assert {type(one) for one in kept.modules()} == kinds
        assert pickle.loads(pickle.dumps(kept)).state_dict().keys() == kept.state_dict().keys()
