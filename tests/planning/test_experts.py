"""Dry runs of experts on several ranks: as many tokens to each, and what ranks hold and send."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import HybridParallelStrategy
from lightning_shard.errors import ConfigError
from tests.expert_parallel.models import EXPERT_MODELS, Listed
from tests.expert_parallel.test_shared_experts import BatchedMixture
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring()


def sharing(**options: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(backend="in_process", announce=False, **options)


class Even(BatchedMixture):
    """Sends as many tokens to each expert, whatever they are."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        weights = self.router(words).softmax(-1)[:, :2]
        first = torch.arange(len(words), device=x.device) % 4
        index = torch.stack([first, (first + 1) % 4], -1)
        return self.experts(words, index, weights).view_as(x)


class EvenModel(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), Even(16)) for _ in range(2))


class Sent(L.Callback):
    """Counts the elements that the last step exchanges along the experts' axis."""

    def __init__(self) -> None:
        self.in_step = self.total = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.mesh_rank == 0:
            now = trainer.strategy.along("ep").traffic["all_to_all"].elements
            self.in_step, self.total = now - self.total, now


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tokens_travel_as_the_dry_run_says(stage: int) -> None:
    torch.manual_seed(7)
    model, sent = EvenModel(), Sent()
    strategy = sharing(expert_parallel_size=2, zero_stage=stage)
    batch = [one.clone() for one in model.data(6)[:6]]
    found = strategy.dry_run(model, batch, world_size=2)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        max_steps=3,
        callbacks=[sent],
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    )
    trainer.fit(model, datamodule=GlobalBatches(model, 3))
    away = 2 * 6 * 16 // 2  # two experts for each word, of which one rank has half
    there_and_back = away * (16 + 1 + 16)  # features and a weight, and the result
    of_counts = 2  # of the other rank's experts
    expected = 2 * (2 * there_and_back + of_counts)  # two mixtures, forward and backward
    assert sent.in_step == expected
    assert found.ranks[0].sent_elements["ep"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_each_rank_holds_its_share_of_the_experts(model: str) -> None:
    module = EXPERT_MODELS[model]()
    batch = [one.clone() for one in module.data(4)[:4]]
    experts = sum(p.numel() for n, p in module.named_parameters() if ".experts." in n)
    others = sum(p.numel() for p in module.parameters()) - experts
    for size in (1, 2, 4):
        strategy = sharing(expert_parallel_size=size, zero_stage=1)
        found = strategy.dry_run(module, batch, world_size=8)
        (rank,) = found.ranks
        assert rank.num_parameters == others + experts // size
        # Adam's two numbers of each element: others over all ranks, experts over those alike
        expected = 2 * 4 * (others / 8 + experts / size / (8 // size))
        assert rank.memory.optimizer_state == pytest.approx(expected, rel=0.02)
        assert found.batch_size == 4 * 8
        assert ("sent ep" in str(found)) == (size > 1)
        assert ("beyond an even share" in str(found)) == (size > 1)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (8, {"context_parallel_size": 2, "zero_stage": 3}),
        (8, {"tensor_parallel_size": 2, "zero_stage": 2}),
        (8, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
        (16, {"context_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}),
    ],
)
def test_beside_other_dimensions(world_size: int, options: dict[str, Any]) -> None:
    module = EXPERT_MODELS["mixtral"]()
    batch = [one.clone() for one in module.data(4)[:4]]
    strategy = sharing(expert_parallel_size=2, **options)
    found = strategy.dry_run(module, batch, world_size=world_size)
    for rank in found.ranks:
        assert rank.sent["ep"] > 0
        assert rank.memory.activations > 0


def test_what_cannot_be_shared_out_is_refused() -> None:
    module = EXPERT_MODELS["mixtral"]()
    batch = [one.clone() for one in module.data(4)[:4]]
    with pytest.raises(ConfigError, match="has 4 experts, which 8 ranks cannot share out evenly"):
        sharing(expert_parallel_size=8).dry_run(module, batch, world_size=8)


def test_experts_in_lists_ask_for_elements() -> None:
    module = Listed()
    batch = [one.clone() for one in module.data(4)[:4]]
    with pytest.raises(ConfigError, match="on tensors without elements, which failed"):
        sharing(expert_parallel_size=2).dry_run(module, batch, world_size=4)


def test_one_rank_needs_no_experts_to_share() -> None:
    """A dry run refused what a fit takes: -1 leaves one rank, where nothing is shared out."""
    module = Listed()
    module.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    batch = [one.clone() for one in module.data(4)[:4]]
    found = sharing(expert_parallel_size=-1, data_parallel_size=1).dry_run(
        module, batch, world_size=1
    )
    assert found.batch_size == 4
