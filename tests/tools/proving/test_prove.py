"""What a verdict says, what a proof refuses, and that it leaves everything as it was."""

import json
import random
from dataclasses import replace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_shard import ConfigError, DDPStrategy, LocalSGDStrategy, ZeRO3Strategy, prove
from lightning_shard.tools.proving.changes import narrowed
from tests.tools.proving.planted import (
    BatchNormed,
    BranchOfRank,
    Contrastive,
    Dropping,
    Net,
    SumOfErrors,
    loader,
)


class Cancelling(Net):
    """A loss that is the small rest of large sums: float32 has few digits of it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        large = 1e5 * self.head.bias.new_ones(()) * (1 + batch[0].new_zeros(()))
        return (super().training_step(batch, batch_idx) + large) - large


class Single(Net):
    """Knows no other format than float32."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch[0].dtype != torch.float32:
            raise TypeError("only float32")
        return super().training_step(batch, batch_idx).float()


class SingleSum(Single):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(batch[0])


def test_what_rounding_explains_is_no_difference() -> None:
    verdict = prove(Cancelling(), loader())
    assert verdict.is_equal
    assert verdict.is_rounding
    assert verdict.precision == "64-true"


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_format": "sharded"},
        {"checkpoint_format": "sharded", "async_save": True},
        {"save_trainable_only": True},
    ],
)
def test_how_a_run_saves_is_not_taken_for_what_it_trains(options: dict[str, Any]) -> None:
    """Sharded checkpoints: weights were compared with what rank 0 alone would write."""
    frozen = Net()
    frozen.head.weight.requires_grad_(False)
    verdict = prove(frozen, loader(), strategy=ZeRO3Strategy(**options))
    assert verdict.is_equal, verdict


def test_without_float64_the_difference_stands_and_the_reader_is_told() -> None:
    verdict = prove(SingleSum(), loader())
    assert verdict.outcome == "different"
    assert verdict.precision == "32-true"
    assert any("only float32" in one for one in verdict.remarks)


def test_a_verdict_as_text_and_as_json() -> None:
    verdict = prove(SumOfErrors(), loader(), strategy="zero3")
    assert verdict.exit_status == 1
    text = str(verdict)
    assert text.startswith("zero3 on 2 ranks: different")
    assert "step 0, the loss, the ranks' mean" in text
    told = json.loads(verdict.as_json())
    assert told["cause"]["name"] == "sum"
    assert told["first"]["got"] == pytest.approx(told["first"]["expected"] / 2)


def test_the_module_the_data_and_the_random_streams_stay() -> None:
    module = BatchNormed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    streams = torch.get_rng_state(), random.getstate()
    prove(module, loader())
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module._trainer is None


def test_without_dropout_the_rest_is_compared() -> None:
    assert prove(Dropping(), loader(), dropout=False).is_equal


def test_lightnings_own_strategy_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match=r"(?s)prove got the strategy 'ddp'.*'shard_ddp'"):
        prove(Net(), loader(), strategy="ddp")


def test_a_refusal_of_the_strategy_is_in_the_verdict() -> None:
    verdict = prove(Net(), loader(), strategy="tensor_parallel")
    assert verdict.outcome == "refused"
    assert "found nothing in Net to split" in verdict.error


def test_an_error_of_the_module_is_in_the_verdict() -> None:
    class Broken(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise KeyError("no such thing")

    verdict = prove(Broken(), loader())
    assert (verdict.outcome, verdict.exit_status) == ("failed", 2)
    assert "no such thing" in verdict.error


@pytest.mark.parametrize(
    "options", [{"num_ranks": 0}, {"num_steps": 0}, {"shrink": 0}, {"narrow": 0}]
)
def test_numbers_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected 1 or more"):
        prove(Net(), loader(), **options)


def test_one_rank_is_not_proved_equal_to_itself() -> None:
    """It was EQUAL, which says nothing of two."""
    with pytest.raises(ConfigError, match="num_ranks=1, expected 2 or more"):
        prove(Net(), loader(), num_ranks=1)


@pytest.mark.parametrize(("num_samples", "num_ranks"), [(1, 2), (5, 8)])
def test_what_a_sampler_repeats_at_the_end_is_no_mistake(num_samples: int, num_ranks: int) -> None:
    """Ranks were said to be given the same samples by the sampler that is advised."""
    samples = Subset(loader().dataset, range(num_samples))
    verdict = prove(Net(), DataLoader(samples), num_ranks=num_ranks, num_steps=1)
    assert verdict.is_equal, verdict


def test_options_that_are_not_of_training_are_refused() -> None:
    with pytest.raises(ConfigError, match="got devices, expected options that change"):
        prove(Net(), loader(), trainer_options={"devices": 4})


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", [DDPStrategy(), ZeRO3Strategy(bucket_mb=1), ZeRO3Strategy])
def test_strategies_by_object_and_by_class(strategy: Any) -> None:
    assert prove(Net(), loader(), strategy=strategy).is_equal


def test_data_of_the_module_itself() -> None:
    class WithData(Net):
        def train_dataloader(self) -> Any:
            return loader()

    assert prove(WithData(), num_steps=2).is_equal


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(40))


def test_a_big_model_is_shrunk_and_the_given_one_is_not() -> None:
    module = Deep()
    verdict = prove(module, loader(), shrink=2)
    assert verdict.is_equal
    assert verdict.remarks[0] == "the model was shrunk: 'body' from 40 to 2 blocks"
    assert len(module.body) == 40


def test_nothing_to_shrink() -> None:
    with pytest.raises(ConfigError, match="shrink=5 found no ModuleList"):
        prove(Net(), loader(), shrink=5)


def test_batches_of_other_lengths_need_a_join() -> None:
    class Ragged(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> list[Tensor]:
            return [torch.ones(1 + index, 6) * index, torch.zeros(1 + index, 1)]

    def collate(batch: list[list[Tensor]]) -> list[Tensor]:
        return [torch.stack(parts).flatten(0, 1).T for parts in zip(*batch, strict=True)]

    class Transposed(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step([batch[0].T, batch[1].T], batch_idx)

    data = torch.utils.data.DataLoader(Ragged(), batch_size=1, collate_fn=collate)
    verdict = prove(Transposed(), data, num_steps=2)
    assert verdict.outcome == "refused"
    assert "prove(join=...)" in verdict.error

    def join(batches: list[list[Tensor]]) -> list[Tensor]:
        return [torch.cat(parts, 1) for parts in zip(*batches, strict=True)]

    joined = prove(Transposed(), data, num_steps=2, join=join)
    assert joined.cause is not None  # batches of other sizes: a mean of means
    assert joined.cause.name == "unequal counts"


@pytest.mark.slow
def test_a_pipeline_shows_a_loss_that_is_no_mean() -> None:
    verdict = prove(Contrastive(), loader(), strategy="pipeline_parallel")
    assert verdict.cause is not None
    assert verdict.cause.name == "batch dependent"


def test_a_callback_that_only_looks_changes_nothing() -> None:
    class Looking(L.Callback):
        seen = 0

        def on_after_backward(self, *_: Any) -> None:
            self.seen += 1

    looking = Looking()
    assert prove(Net(), loader(), trainer_options={"callbacks": [looking]}).is_equal
    assert looking.seen == 0  # runs get copies


def test_a_difference_without_a_cause_says_so() -> None:
    verdict = prove(SumOfErrors(), loader())
    assert replace(verdict, cause=None).lines()[0][0] == "first"


class Llama(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
        self.network = LlamaForCausalLM(config)
        self.network.model.embed_tokens.weight.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wide(Net):
    def __init__(self, hidden_dim: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.head = nn.Sequential(nn.Linear(6, hidden_dim), nn.Linear(hidden_dim, 1))


def _tokens() -> Any:
    tokens = torch.randint(32, (24, 8), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2)


def test_a_wide_model_is_made_narrow_by_its_configuration() -> None:
    module = Llama()
    verdict = prove(module, _tokens(), strategy="tensor_parallel", narrow=4, shrink=2, num_steps=2)
    assert verdict.is_equal, verdict
    assert verdict.remarks[0] == "the model was made narrow, from 96,704 to 6,896 parameters"
    assert verdict.remarks[1].startswith("the model was shrunk")
    assert module.network.config.hidden_size == 64
    small, _ = narrowed(module, 4)
    assert (small.network.config.num_attention_heads, small.network.config.head_dim) == (2, 8)
    assert not small.network.model.embed_tokens.weight.requires_grad


def test_a_module_is_made_narrow_by_its_own_arguments() -> None:
    small, told = narrowed(Wide(), 8)
    assert small.head[0].out_features == 8
    assert "narrow" in told


@pytest.mark.parametrize(
    ("module", "factor", "said"),
    [(Net, 2, "narrow=2 found no width in Net"), (Wide, 7, "does not divide hidden_dim=64")],
)
def test_a_model_that_cannot_be_made_narrow(module: Any, factor: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prove(module(), loader(), narrow=factor)


@pytest.mark.slow
def test_a_loss_in_float32_is_no_difference_in_float64() -> None:
    """Hugging Face's losses are computed in float32: float64 called their rounding a mistake."""
    verdict = prove(Llama(), _tokens(), strategy="zero2", num_ranks=3, precision="64-true")
    assert verdict.is_equal, verdict


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_half_precision_is_held_against_accumulated_gradients(precision: str) -> None:
    verdict = prove(Llama(), _tokens(), strategy="zero3", precision=precision)
    assert verdict.is_equal, verdict


class WrongInHalf(Net):
    """Scales its loss where nothing but half precision is computed, and only on several ranks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_half = torch.is_autocast_enabled("cpu")
        return loss * 2 if is_half and self.trainer.world_size > 1 else loss


def test_a_mistake_in_half_precision_alone_is_named() -> None:
    verdict = prove(WrongInHalf(), loader(), precision="bf16-mixed")
    assert verdict.outcome == "different"
    assert verdict.cause is not None
    assert verdict.cause.name == "half precision"
    assert verdict.first is not None
    assert (verdict.first.place.step, verdict.first.place.kind) == (0, "loss")


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("local_sgd", "each rank with one device on its own samples"),
        ("async_sgd", "with staleness_bound=0"),
        ("shard_ddp_int8", "without compression"),
        ("shard_ddp_powersgd", "without compression"),
    ],
)
def test_what_differs_by_design_is_compared_without_it(strategy: str, said: str) -> None:
    verdict = prove(Net(), loader(), strategy=strategy)
    assert verdict.is_equal, verdict
    assert said in verdict.remarks[0]


@pytest.mark.slow
def test_under_diloco_each_rank_is_one_device_until_they_meet() -> None:
    strategy = LocalSGDStrategy(
        sync_every=2, outer_optimizer="nesterov", compression="int8", warmup_steps=1
    )
    assert prove(BatchNormed(), loader(), strategy=strategy, num_ranks=3).is_equal
    verdict = prove(BranchOfRank(), loader(), strategy=strategy, num_ranks=3)
    assert verdict.cause is not None
    assert verdict.cause.name == "rank dependent"
    assert verdict.first is not None
    assert (verdict.first.rank, verdict.first.place.name) == (1, "body.0.0")
    drops = prove(Dropping(), loader(), strategy=strategy)
    assert drops.cause is not None
    assert drops.cause.name == "random numbers"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("strategy", ["async_sgd", "shard_ddp_topk"])
def test_a_mistake_under_what_differs_by_design_is_named(strategy: str) -> None:
    verdict = prove(SumOfErrors(), loader(), strategy=strategy)
    assert verdict.cause is not None
    assert verdict.cause.name == "sum"


class CountsInItsClass(Net):
    """Scales its loss by how many steps there were, as its class has counted them."""

    num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        type(self).num_steps += 1
        return super().training_step(batch, batch_idx) * (1 + self.num_steps % 7)


def test_a_counter_that_threads_share_is_not_called_random_numbers() -> None:
    """A counter that threads share was called random numbers."""
    verdict = prove(CountsInItsClass(), loader())
    assert verdict.cause is not None
    assert verdict.cause.name == "shared attribute"
    assert "CountsInItsClass.num_steps belongs to a class" in verdict.cause.because


class RunsAway(Net):
    """Learns so fast that its loss grows without end, and with it what ranks do otherwise."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * 1e4
        return loss * (1 + self.global_rank * (loss.detach() > 1e15))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e4)


def test_a_fit_that_diverges_on_one_device_is_not_blamed_on_the_ranks() -> None:
    """A fit that diverges on one device was blamed on the ranks."""
    verdict = prove(RunsAway(), loader(), num_steps=3)
    assert verdict.cause is not None
    assert verdict.cause.name == "divergence"
