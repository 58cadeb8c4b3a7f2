"""What a verdict says, what a proof refuses, and that it leaves everything as it was."""

import json
import random
from dataclasses import replace
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError, DDPStrategy, ZeRO3Strategy, prove
from tests.proving.planted import BatchNormed, Contrastive, Dropping, Net, SumOfErrors, loader


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


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_format": "sharded"},
        {"checkpoint_format": "sharded", "async_save": True},
        {"save_trainable_only": True},
    ],
)
def test_how_a_run_saves_was_taken_for_what_it_trains(options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("strategy", ["local_sgd", "async_sgd", "shard_ddp_int8"])
def test_what_differs_by_design_is_refused(strategy: str) -> None:
    verdict = prove(Net(), loader(), strategy=strategy)
    assert (verdict.outcome, verdict.exit_status) == ("refused", 2)
    assert "differs by design" in verdict.error


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


@pytest.mark.parametrize("options", [{"num_ranks": 0}, {"num_steps": 0}, {"shrink": 0}])
def test_numbers_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected 1 or more"):
        prove(Net(), loader(), **options)


def test_options_that_are_not_of_training_are_refused() -> None:
    with pytest.raises(ConfigError, match="got devices, expected options that change"):
        prove(Net(), loader(), trainer_options={"devices": 4})


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
