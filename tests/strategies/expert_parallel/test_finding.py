"""Which modules are taken for experts, and that they train as on one device, also over Gloo."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.finding import find_mixtures
from tests.expert_parallel.models import Listed
from tests.processes import run_processes
from tests.strategies.expert_parallel.test_expert_parallel import fit, sharing
from tests.strategies.expert_parallel.test_parity import build, single_device
from tests.strategies.parity import (
    LONG_STEPS,
    SMALL_BUCKET_MB,
    Run,
    assert_parity,
    ignore_upstream_warnings,
    ignoring,
    train,
)

pytestmark = ignoring()

WIDTH, NUM = 16, 4


class InTensors(nn.Module):
    """Experts in tensors, which holds their number under a name, or nowhere."""

    def __init__(self, number: str = "") -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM, WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(NUM, WIDTH, WIDTH) / 4)
        self.number = number
        if number:
            setattr(self, number, NUM)

    def forward(self, words: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(words)
        for expert in range(getattr(self, self.number) if self.number else NUM):
            at, place = torch.where(chosen == expert)
            hidden = torch.tanh(words[at] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, at, hidden * weights[at, place, None])
        return result


class Mixture(nn.Module):
    def __init__(self, number: str = "", held_as: str = "experts") -> None:
        super().__init__()
        self.router, self.held_as = nn.Linear(WIDTH, NUM), held_as
        self.add_module(held_as, InTensors(number))

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        weights, chosen = self.router(words).softmax(-1).topk(2)
        return self.get_submodule(self.held_as)(words, chosen, weights).view_as(x)


class BesideHeads(Mixture):
    """As many heads as there are experts, in a list beside the router."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM))

    def forward(self, x: Tensor) -> Tensor:
        mixed = super().forward(x)
        return torch.stack([head(mixed) for head in self.heads]).mean(0)


class InDict(nn.Module):
    """Experts in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM)
        self.experts = nn.ModuleDict({f"of {n}": nn.Linear(WIDTH, WIDTH) for n in range(NUM)})

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        weights, chosen = self.router(words).softmax(-1).max(-1)
        result = torch.zeros_like(words)
        for number, expert in enumerate(self.experts.values()):
            (at,) = torch.where(chosen == number)
            if len(at):
                result = result.index_add(0, at, expert(words[at]) * weights[at, None])
        return result.view_as(x)


MIXTURES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "beside heads": (BesideHeads, ["experts"]),
    "by name": (Mixture, ["experts"]),
    "a number of another name": (lambda: Mixture("E"), ["experts"]),
    "beside a router": (lambda: Mixture("count", "ffn"), ["ffn"]),
    "a number of experts": (lambda: Mixture("n_experts", "ffn"), ["ffn"]),
    "in a dictionary": (InDict, ["experts"]),
}


def model_with(name: str) -> Listed:
    torch.manual_seed(0)
    model = Listed()
    model.blocks = nn.ModuleList(MIXTURES[name][0]() for _ in range(2))
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_found_by_a_number_a_name_or_their_router(name: str) -> None:
    """Experts in tensors were found only by an attribute with "expert" in its name.

    Any list of equal modules beside a matrix of as many rows was taken for experts.
    """
    make, expected = MIXTURES[name]
    assert [one.name for one in find_mixtures(make())] == expected


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_train_as_on_a_single_device(name: str) -> None:
    runs = []
    for strategy, num_ranks in ((sharing(zero_stage=2), 2), ("auto", 1)):
        model = model_with(name)
        fit(model, strategy, num_ranks)
        runs.append({n: param.detach() for n, param in model.named_parameters()})
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)


def test_both_kinds_are_still_refused_by_name() -> None:
    """It ended in a StopIteration."""
    model = model_with("by name")
    model.blocks[1] = Listed().blocks[0]
    with pytest.raises(ConfigError, match=r"in tensors \('blocks.0.experts'\) and in lists"):
        fit(model, sharing())


def trained_by_processes() -> list[Run]:
    ignore_upstream_warnings()
    return [
        train(
            build(name),
            strategy=sharing(backend="gloo", zero_stage=2, bucket_mb=SMALL_BUCKET_MB),
            devices=2,
            num_steps=LONG_STEPS,
        )
        for name in ("mixtral", "seldom")
    ]


@pytest.mark.slow
def test_two_processes_over_gloo_equal_a_single_device() -> None:
    runs = run_processes(trained_by_processes, 2)[0]
    for name, run in zip(("mixtral", "seldom"), runs, strict=True):
        assert_parity(run, single_device(name), num_steps=LONG_STEPS)
