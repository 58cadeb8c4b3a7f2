"""A checkpoint of tensor parallel is a single device's file, both ways, and what failure leaves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor

from lightning_shard import ConfigError, TensorParallelStrategy
from tests.checkpoint.scheme_files import (
    FILTERS,
    Save,
    assert_goes_on,
    assert_same,
    assert_same_files,
    assert_shards_are_left,
    batches,
    build_double,
    load,
    saving,
    trainer_of,
)
from tests.strategies.models import Trained
from tests.strategies.parity import GlobalBatches, build, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = FILTERS


@dataclass(frozen=True)
class Scheme:
    """A strategy on so many in-process ranks; `tp` of them share each layer."""

    strategy: str
    num_ranks: int
    tp: int = 1
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.strategy}x{self.num_ranks}-tp{self.tp}-stage{self.stage}"

    def trainer(self, model: str, **options: Any) -> L.Trainer:
        strategy: Any = self.strategy
        if self.strategy == "tensor_parallel":
            strategy = TensorParallelStrategy(
                backend="in_process",
                tensor_parallel_size=self.tp,
                plan=PLANS[model],
                zero_stage=self.stage,
            )
        return trainer_of(strategy, self.num_ranks, **options)


PLAIN = Scheme("auto", 1)
ZERO2 = Scheme("zero2_in_process", 2)
TP2 = Scheme("tensor_parallel", 2, 2)
TP4 = Scheme("tensor_parallel", 4, 4)
TP2_STAGES = [Scheme("tensor_parallel", 4, 2, stage) for stage in range(4)]
SPLIT = [TP2, TP4, *TP2_STAGES]
QUICK = (TP2, TP2_STAGES[3])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    return saving(tmp_path_factory)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in SPLIT],
    ids=str,
)
@pytest.mark.parametrize("model", ["gpt", "gpt2"])
def test_the_file_is_that_of_a_single_device(model: str, scheme: Scheme, saved: Save) -> None:
    assert_same_files(saved(model, scheme), saved(model, PLAIN))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((one, PLAIN) for one in QUICK),
        *((PLAIN, one) for one in QUICK),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for one in SPLIT
            if one not in QUICK
            for pair in ((one, PLAIN), (PLAIN, one))
        ),
        (TP2, ZERO2),
        (ZERO2, TP2),
        (TP2_STAGES[3], TP4),
        (TP4, TP2_STAGES[3]),
        (TP2_STAGES[1], TP2_STAGES[2]),
        (TP2, TP2),
    ],
    ids=str,
)
def test_resume(before: Scheme, after: Scheme, saved: Save) -> None:
    file = saved("gpt", before).first_epoch
    assert_goes_on(build_double("gpt"), "gpt", file, after, saved("gpt", PLAIN))


@pytest.mark.slow
def test_plain_torch_loads_the_weights(saved: Save) -> None:
    file = saved("gpt", TP2_STAGES[3]).last_epoch
    model = build_double("gpt")
    model.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    expected = load(saved("gpt", PLAIN).last_epoch)["state_dict"]
    assert_same(dict(model.state_dict()), dict(expected))


@pytest.mark.parametrize("scheme", [TP2, TP2_STAGES[3]], ids=str)
def test_a_failed_fit_leaves_nothing_that_can_be_mistaken_for_a_full_model(
    scheme: Scheme, tmp_path: Path
) -> None:
    assert_shards_are_left("gpt", scheme, ZERO2, tmp_path / "broken.ckpt")


def test_a_refused_plan_leaves_the_model_as_it_was() -> None:
    """A fit whose set-up fails gives the module back as it was."""
    model = build_double("gpt")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    strategy = TensorParallelStrategy(
        backend="in_process",
        plan={
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "blocks.*.qkv": "packed_colwise(3)",
        },
    )
    model.blocks[2].qkv = torch.nn.Linear(32, 97).double()
    with pytest.raises(ConfigError, match="97"):
        quiet_trainer(strategy=strategy, devices=2).fit(model, datamodule=batches(model))
    assert [type(module) for module in model.modules()] == classes
    for name, value in model.state_dict().items():
        if "blocks.2.qkv" not in name:
            assert torch.equal(value, before[name].to(value)), name


def test_a_resumed_run_of_another_precision_keeps_the_weights(saved: Save) -> None:
    model: Trained = build("gpt")
    strategy = TensorParallelStrategy(backend="in_process", plan=PLANS["gpt"])
    state = load(saved("gpt", TP2).first_epoch)["state_dict"]
    model.load_state_dict(state)
    quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(
        model, datamodule=GlobalBatches(model, 1)
    )
    moved: dict[str, Tensor] = model.state_dict()
    assert all(not torch.equal(value, state[name].float()) for name, value in moved.items())
