"""Validation, test, prediction, generation on sharded models: in a fit, after it, without one."""

from typing import Any, ClassVar

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.strategies.models import ConvNet, ConvNetOfRanks, ExampleGPT, Trained
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    GlobalBatches,
    ignoring,
    quiet_trainer,
)
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import BATCH, Stack, fit, trainer_of

pytestmark = ignoring()

NUM_STEPS = 4


class Evaluated(Trained):
    """Logs its loss in each kind of step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class EvaluatedGPT(Evaluated, ExampleGPT):
    pass


class EvaluatedConvNet(Evaluated, ConvNet):
    pass


class EvaluatedConvNetOfRanks(Evaluated, ConvNetOfRanks):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


class EvaluationBatches(GlobalBatches):
    """The training set serves every purpose; each rank takes its part of each batch."""

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def test_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.train_dataloader()


def seeded(cls: type[Trained], *args: int) -> Trained:
    torch.manual_seed(7)
    return cls(*args)


def trainer(strategy: str | None = None, num_ranks: int = 1, **options: Any) -> L.Trainer:
    if strategy is not None:
        options["strategy"] = STRATEGIES[strategy](backend="in_process", bucket_mb=SMALL_BUCKET_MB)
    return quiet_trainer(devices=num_ranks, max_steps=NUM_STEPS, **options)


def batches(model: Trained) -> EvaluationBatches:
    return EvaluationBatches(model, NUM_STEPS)


def results(fitted: L.Trainer, model: Trained) -> tuple[float, float, list[Tensor]]:
    """Validate, test and predict on the Trainer that has fitted the model."""
    data = batches(model)
    (validated,) = fitted.validate(model, datamodule=data, verbose=False)
    (tested,) = fitted.test(model, datamodule=data, verbose=False)
    return validated["val_loss"], tested["test_loss"], fitted.predict(model, datamodule=data)


def assert_shares(got: list[Tensor], expected: list[Tensor], num_ranks: int) -> None:
    """Compare predictions with the parts of each batch that the ranks' own samplers take."""
    parts = [one[rank::num_ranks] for one in expected for rank in range(num_ranks)]
    for ours, theirs in zip(got, parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def check_evaluation(ranks: L.Trainer, num_shares: int) -> None:
    """Fit, validate, test, predict and fit again, as on one device."""
    full, single = seeded(EvaluatedGPT), trainer()
    single.fit(full, datamodule=batches(full))
    model = seeded(EvaluatedGPT)
    ranks.fit(model, datamodule=batches(model))
    assert ranks.callback_metrics["val_loss"].item() == pytest.approx(
        single.callback_metrics["val_loss"].item(), rel=1e-5
    )
    got, expected = results(ranks, model), results(single, full)
    assert got[:2] == pytest.approx(expected[:2], rel=1e-5)
    assert_shares(got[2], expected[2], num_shares)
    for fitted, its_model in ((ranks, model), (single, full)):
        fitted.fit_loop.max_epochs, fitted.fit_loop.epoch_loop.max_steps = -1, 2 * NUM_STEPS
        fitted.fit(its_model, datamodule=batches(its_model))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, full.state_dict()[name], rtol=1e-5, atol=2e-7)


def check_without_a_fit(ranks: L.Trainer, num_shares: int) -> None:
    model = seeded(EvaluatedGPT)
    expected, got = results(trainer(), model), results(ranks, model)
    assert got[:2] == pytest.approx(expected[:2], rel=1e-5)
    assert_shares(got[2], expected[2], num_shares)


def check_given_back(model: Trained, fitted: L.Trainer) -> None:
    """Find parameters free, and their state full."""
    for param in model.parameters():
        assert param.is_leaf
        assert param.requires_grad
        assert param.grad is None
        assert not param._post_accumulate_grad_hooks
        state = fitted.optimizers[0].state[param]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fit_then_validate_test_predict_and_fit_again(strategy: str) -> None:
    check_evaluation(trainer(strategy, 3), 3)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_callers_module_is_full_and_free_after_a_fit(strategy: str) -> None:
    model = seeded(EvaluatedGPT)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    ours = trainer(strategy, 4)
    ours.fit(model, datamodule=batches(model))
    assert {name: param.shape for name, param in model.named_parameters()} == shapes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    check_given_back(model, ours)
    before = [param.detach().clone() for param in model.parameters()]
    trainer().fit(model, datamodule=batches(model))  # plain Lightning goes on with it
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_validates_with_rank_zeros_running_statistics(strategy: str) -> None:
    num_ranks = 2
    full, single = seeded(EvaluatedConvNetOfRanks, num_ranks), trainer()
    single.fit(full, datamodule=batches(full))
    model, ranks = seeded(EvaluatedConvNet), trainer(strategy, num_ranks)
    ranks.fit(model, datamodule=batches(model))
    assert ranks.callback_metrics["val_loss"].item() == pytest.approx(
        single.callback_metrics["val_loss"].item(), rel=1e-5
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero3"])
def test_evaluation_without_a_fit(strategy: str) -> None:
    check_without_a_fit(trainer(strategy, 3), 3)


class Halved(Stack):
    """Evaluates with half of its weights, and puts back what it has kept of them."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, list[float], list[torch.Size]]] = []

    def look(self, hook: str) -> None:
        params = list(self.parameters())
        norms = [float(p.detach().norm()) for p in params]
        self.read.append((hook, norms, [p.shape for p in params]))

    @torch.no_grad()
    def on_validation_start(self) -> None:
        self.look("start")
        self.kept = [p.detach().clone() for p in self.parameters()]
        for p in self.parameters():
            p.mul_(0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.look("batch end")

    @torch.no_grad()
    def on_validation_end(self) -> None:
        self.look("end")
        for p, kept in zip(self.parameters(), self.kept, strict=True):
            p.copy_(kept)
        self.head.weight[0].zero_()

    def val_dataloader(self) -> Any:
        num_ranks = (self.trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
        return DataLoader(self.dataset(), batch_size=BATCH // num_ranks)


def evaluated(strategy: Any, num_ranks: int) -> tuple[float, dict[str, Any], Any]:
    torch.manual_seed(3)
    module = Halved()
    trainer = trainer_of(strategy, devices=num_ranks, use_distributed_sampler=True)
    loss = trainer.validate(module, verbose=False)[0]["loss"]
    return loss, module.state_dict(), module.read


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
@pytest.mark.parametrize("scheme", ["zero3", "tensor", "pipeline", "zero2"])
def test_hooks_of_an_evaluation_see_full_weights(scheme: str) -> None:
    """Under zero3 a weight had the shape and the norm of its shard."""
    num_ranks, make = SCHEMES[scheme]
    loss, weights, read = evaluated("auto", 1)
    its_loss, its_weights, its_read = evaluated(make(), num_ranks)
    assert its_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(its_weights, weights, rtol=1e-5, atol=2e-7)
    for (hook, norms, shapes), (its_hook, its_norms, its_shapes) in zip(
        read, its_read, strict=True
    ):
        assert (its_hook, its_shapes) == (hook, shapes)
        assert its_norms == pytest.approx(norms, rel=1e-5)


END, NUM_WORDS, NUM_NEW = 10, 13, 12


class Measured(Stack):
    """Validates with the norm of its weights, which its steps go on with."""

    options: ClassVar[dict[str, Any]] = {"limit_val_batches": 1, "val_check_interval": 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.norm = float(sum(param.norm() for param in self.parameters()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.norm / 30

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.slow
@pytest.mark.few_cases(2)
@pytest.mark.filterwarnings("ignore:A step uses .* parameters outside of their stage")
@pytest.mark.parametrize("scheme", ["zero3", "tensor", "pipeline", "hybrid"])
def test_a_validation_without_the_network_sees_full_weights(scheme: str) -> None:
    """Under pipeline parallel a rank saw none of other stages' weights, with another norm."""
    num_ranks, make = SCHEMES[scheme]
    style = type("OfRanks", (Measured,), {"train_dataloader": OfRanks.train_dataloader})
    alone, got = fit(style), fit(style, make(), devices=num_ranks)
    torch.testing.assert_close(got.curve.losses, alone.curve.losses, rtol=1e-5, atol=0)


class Writer(L.LightningModule):
    def __init__(self, texts: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        torch.manual_seed(0)
        self.net = LlamaForCausalLM(
            LlamaConfig(vocab_size=NUM_WORDS, num_hidden_layers=2, **sizes, initializer_range=1.0)
        )
        self.texts = texts

    def written(self, words: Tensor) -> Tensor:
        mask, ends = torch.ones_like(words), {"eos_token_id": END, "pad_token_id": 0}
        found: Tensor = self.net.generate(
            words, attention_mask=mask, max_new_tokens=NUM_NEW, **ends
        )
        return found

    def validation_step(self, words: Tensor, batch_idx: int) -> None:
        self.texts.append((words, self.written(words)))

    def __deepcopy__(self, memo: object) -> "Writer":
        return Writer(self.texts)


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")
def test_ranks_whose_texts_end_at_other_words_do_not_wait_for_each_other() -> None:
    """One gathered the weights for its next word, which the other did not need."""
    words = torch.randint(4, NUM_WORDS, (12, 1), generator=torch.Generator().manual_seed(1))
    texts: list[tuple[Tensor, Tensor]] = []
    trainer = quiet_trainer(strategy="zero3_in_process", devices=2)
    trainer.validate(Writer(texts), DataLoader(words, batch_size=1), verbose=False)
    alone = Writer([])
    lengths = set()
    for given, found in texts:
        expected = alone.written(given)
        lengths.add(expected.shape[1])
        assert torch.equal(found[:, : expected.shape[1]], expected)
    assert len(texts) == 12
    assert len(lengths) > 2
    assert not hasattr(trainer.lightning_module.net, "_is_fsdp_managed_module")
