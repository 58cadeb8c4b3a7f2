"""What a step does with experts' weights beside their forwards is done with full ones."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from lightning_shard import HybridParallelStrategy
from lightning_shard.errors import ConfigError
from tests.expert_parallel.models import Listed, ListedMixture, mixtral
from tests.strategies.models import HuggingFaceLM
from tests.strategies.parity import SMALL_BUCKET_MB, Run, assert_parity, ignoring, train

pytestmark = ignoring()
NUM_STEPS, WIDTH, NUM_EXPERTS = 3, 16, 4


class Experts(nn.Module):
    """Experts in tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in range(self.num_experts):
            at, place = torch.where(index == expert)
            hidden = F.gelu(x[at] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, at, hidden * weights[at, place, None])
        return result


class BatchedMixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        weights, chosen = self.router(words).softmax(-1).topk(2)
        # the order of arguments is the module's own affair
        return self.experts(index=chosen, weights=weights, x=words).view_as(x)


class Reading(ListedMixture):
    """Reads its experts' weights in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        means = torch.stack([expert.up.weight.mean(0) for expert in self.experts])
        return super().forward(x) + x @ means.T @ means


class ReadingBatched(BatchedMixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x * self.experts.down[3].mean() + self.experts.up.std()


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "listed": lambda: ListedMixture(WIDTH, NUM_EXPERTS),
    "batched": lambda: BatchedMixture(WIDTH),
    "listed, reads": lambda: Reading(WIDTH, NUM_EXPERTS),
    "batched, reads": lambda: ReadingBatched(WIDTH),
}


def experts_of(module: Any, layer: int = 0) -> list[nn.Parameter]:
    return list(module.blocks[layer][1].experts.parameters())


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "none": lambda module: 0.0,
    # Each rank took its own experts': losses, norms and gradients were others, without a word.
    "norms": lambda module: sum(p.norm() for p in module.parameters()),
    "means": lambda module: sum(p.abs().mean() for p in module.parameters()),
    "squares": lambda module: sum(p.square().sum() for p in module.parameters()) / 10,
    "one vector": lambda module: parameters_to_vector(module.parameters()).norm(),
    "one expert's": lambda module: experts_of(module)[0].square().mean() * 10,
    "experts alone": lambda module: sum(
        p.norm() for block in module.blocks for p in block[1].experts.parameters()
    ),
    "experts alone, without gradients": lambda module: (
        sum(p.detach().norm() for p in module.blocks[0][1].experts.parameters())
        * module.head.weight.norm()
    ),
    "numbers of elements": lambda module: (
        sum(p.numel() for p in module.parameters()) * 1e-4 * module.head.weight.norm()
    ),
    "without gradients": lambda module: (
        sum(p.detach().norm() for p in module.parameters()) * module.head.weight.norm()
    ),
    "another for each rank": lambda module: (
        module.last_mean * sum(p.square().mean() for p in experts_of(module, 1))
    ),
}


class Penalised(Listed):
    def __init__(self, mixture: str, penalty: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), MIXTURES[mixture]()) for _ in range(2)
        )
        self.penalty = PENALTIES[penalty]

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.last_mean = self.embedding(batch[0]).mean() * 100
        return super().loss(batch) + 0.01 * self.penalty(self)


def build(*kind: str) -> Any:
    torch.manual_seed(7)
    return Penalised(*kind).double()


@cache
def alone(*kind: str) -> Run:
    return train(build(*kind), precision="64-true", num_steps=NUM_STEPS)


def shared(num_ranks: int, options: dict[str, Any], *kind: str) -> Run:
    strategy = HybridParallelStrategy(
        backend="in_process",
        expert_parallel_size=2,
        announce=False,
        bucket_mb=SMALL_BUCKET_MB,
        **options,
    )
    return train(
        build(*kind), strategy=strategy, devices=num_ranks, precision="64-true", num_steps=NUM_STEPS
    )


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage0": (2, {"zero_stage": 0}),
    "dp2-stage1": (4, {"zero_stage": 1}),
    "dp2-stage2": (4, {"zero_stage": 2}),
    "stage3": (2, {"zero_stage": 3}),
    "tp2": (4, {"zero_stage": 1, "tensor_parallel_size": 2}),
    "cp2": (4, {"zero_stage": 1, "context_parallel_size": 2}),
}
QUICK = {
    ("listed", "norms", "dp2-stage1"),
    ("batched", "means", "stage3"),
    ("listed", "one expert's", "stage0"),
    ("listed", "experts alone", "stage3"),
    ("batched", "another for each rank", "dp2-stage2"),
    ("listed, reads", "none", "stage3"),
    ("batched, reads", "none", "dp2-stage1"),
}


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:The block .* which has no rule")
@pytest.mark.parametrize(
    ("mixture", "penalty", "layout"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for mixture in MIXTURES
        for penalty in PENALTIES
        for layout in LAYOUTS
        for case in [(mixture, penalty, layout)]
        if "reads" not in mixture or penalty == "none"
        if "listed" in mixture or layout != "tp2"  # of which tensor parallel splits nothing
    ],
)
def test_penalties_over_experts_are_those_of_a_single_device(
    mixture: str, penalty: str, layout: str
) -> None:
    expected, run = alone(mixture, penalty), shared(*LAYOUTS[layout], mixture, penalty)
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(run.norms, expected.norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-8, atol=1e-10)


class PenalisedMixtral(HuggingFaceLM):
    """Experts that tensor parallel splits as well."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.norm() for p in self.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_penalties_over_split_experts_are_those_of_a_single_device(stage: int) -> None:
    def build() -> Any:
        torch.manual_seed(7)
        return PenalisedMixtral(mixtral().network)

    strategy = HybridParallelStrategy(
        backend="in_process",
        expert_parallel_size=2,
        tensor_parallel_size=2,
        zero_stage=stage,
        announce=False,
        bucket_mb=SMALL_BUCKET_MB,
    )
    run = train(build(), strategy=strategy, devices=4)
    assert_parity(run, train(build()))


class ByHand(Listed):
    """Clips and counts in its own step."""

    def __init__(self, mixture: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), MIXTURES[mixture]()) for _ in range(2)
        )
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.seen.append(clip_grad_norm_(self.parameters(), 0.05).item())
        self.seen += [-1.0 if p.grad is None else p.grad.norm().item() for p in self.parameters()]
        optimizer.step()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mixture", ["listed", "batched"])
def test_gradients_clipped_in_a_step_are_those_of_a_single_device(mixture: str, stage: int) -> None:
    from tests.strategies.expert_parallel.test_expert_parallel import fit, sharing

    results = []
    for strategy, num_ranks in (("auto", 1), (sharing(zero_stage=stage), 2)):
        torch.manual_seed(7)
        model = ByHand(mixture).double()
        fit(
            model,
            strategy,
            num_ranks,
            precision="64-true",
            accumulate_grad_batches=1,
            gradient_clip_val=None,
        )
        results.append((model.seen, dict(model.state_dict())))
    (seen, weights), (own_seen, own_weights) = results
    torch.testing.assert_close(own_seen, seen, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(own_weights, weights, rtol=1e-8, atol=1e-10)


def test_a_pipeline_refuses_to_differentiate_what_one_rank_has() -> None:
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    with pytest.raises(ConfigError, match=r"reads a weight of shape .* of an expert in a list"):
        shared(4, options, "listed, reads", "none")
