"""What cannot be right with shared experts is refused by name, before anything is trained."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.exchange import Routes
from lightning_shard.profiling import ExpertBalance
from tests.expert_parallel.models import Expert, Listed, ListedMixture, mixtral
from tests.strategies.expert_parallel.test_expert_parallel import (
    Seen,
    fit,
    sharing,
    with_adafactor,
    with_mixture,
)
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()


class WrongGradient(nn.Module):
    """A mixture whose gradient depends on how many tokens an expert sees at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(CentredExpert(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        weights, chosen = self.router(words).softmax(-1).max(-1)
        result = torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(chosen == number)
            if len(at):
                result = result.index_add(0, at, expert(words[at]) * weights[at, None])
        return result.view_as(x)


class CentredExpert(Expert):
    """Subtracts the mean over its tokens, of all ranks where they come together."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Chained(WrongGradient):
    """An expert is given what another one has made."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        for number, expert in enumerate(self.experts):
            if (words.sum() > number - 100).item() or number == 0:
                words = words + expert(words[: 1 + int(words.detach().abs().sum()) % 3]).mean()
        return words.view_as(x)


class Counted(ListedMixture):
    """An expert with statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4)
        for expert in self.experts:
            expert.register_buffer("seen", torch.zeros(()))


def tied(numbers: Iterable[int], width: int) -> ListedMixture:
    """Return a mixture of which some experts have one matrix."""
    mixture = ListedMixture(width, 4)
    first, *others = (mixture.experts[number] for number in numbers)
    for other in others:
        other.down.weight = first.down.weight
    return mixture


class SharedWithItself(ListedMixture):
    """The shared expert has a matrix of one of the others."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4)
        self.shared.down.weight = self.experts[0].down.weight


class OneFrozen(ListedMixture):
    """Trains three of four."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4)
        self.experts[2].requires_grad_(False)


class Checkpointed(ListedMixture):
    """Recomputes itself, from within."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Counting(ListedMixture):
    """Works with the memory of its experts' weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = [expert.up.__dict__["_parameters"]["weight"] for expert in self.experts]
        return super().forward(x) + sum(one[0, 0].detach() for one in weights)


class OutsideCalled(Listed):
    """Calls an expert beside its mixture."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        one: Any = self.blocks[0][1]
        return super().loss(batch) + one.experts[0](self.embedding(batch[0])).square().mean()


class Unlisted(Listed):
    """Has no mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "experts that depend on their peers' tokens": (
        lambda: with_mixture(WrongGradient),
        {},
        "computes something else with its 4 experts on 2 ranks than with all on one",
    ),
    "experts after experts": (
        lambda: with_mixture(Chained),
        {},
        "ran twice with the same tokens and called other experts the second time|"
        "computes something else",
    ),
    "buffers": (lambda: with_mixture(Counted), {}, "has the buffer 'seen'"),
    "a number that does not divide": (
        lambda: Listed(num_experts=6),
        {"num_parts": 4},
        "has 6 experts, which 4 ranks cannot share out evenly; expected an expert_parallel_size "
        "of 2, 3, 6",
    ),
    "no mixture": (Unlisted, {}, "but Unlisted has none"),
    "calls outside": (OutsideCalled, {}, "was called outside of the forward of ListedMixture"),
    "weights that all experts share": (
        lambda: with_mixture(lambda width: tied(range(4), width)),
        {},
        r"'blocks.1.1.experts.0.down.weight' and 'blocks.1.1.experts.2.down.weight' are one param",
    ),
    "weights that experts of two ranks share": (
        lambda: with_mixture(lambda width: tied((1, 3), width)),
        {},
        r"'blocks.1.1.experts.1.down.weight' and 'blocks.1.1.experts.3.down.weight' are one param",
    ),
    "weights shared with another layer": (
        lambda: with_mixture(SharedWithItself),
        {},
        r"'blocks.1.1.experts.0.down.weight' and 'blocks.1.1.shared.down.weight' are one parameter",
    ),
    "experts of which one is frozen": (
        lambda: with_mixture(OneFrozen),
        {},
        r"experts.0.up.weight is trained and blocks.1.1.experts.2.up.weight is frozen",
    ),
    "a checkpoint within the mixture": (
        lambda: with_mixture(Checkpointed),
        {},
        r"which another rank has, was called in a backward: the forward of Checkpointed recomputes",
    ),
    "what fails with some experts": (
        lambda: with_mixture(Counting),
        {},
        r"\(Counting\) runs with all experts on one rank, but not with its 4 experts on 2 ranks "
        r"\(IndexError",
    ),
    "whole matrices": (
        lambda: with_adafactor(Listed()),
        {},
        "Adafactor does not update each element by itself, but ZeRO stage 1",
    ),
    "whole matrices in tensors": (
        lambda: with_adafactor(mixtral()),
        {"zero_stage": 0},
        "Adafactor does not update each element by itself, but expert parallel gives each rank",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case: str) -> None:
    make, options, message = REFUSED[case]
    strategy = sharing(**options)
    with pytest.raises(ConfigError, match=message):
        fit(make(), strategy, 4 if case == "a number that does not divide" else 2)


def test_several_copies_of_the_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts and other parameters are on different ranks"):
        sharing(data_parallel_size=(2, 2))


class Predicting(Listed):
    """Predicts."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


def test_predictions_of_other_numbers_of_batches_are_refused() -> None:
    model = Predicting()
    trainer = quiet_trainer(strategy=sharing(), devices=2)
    with pytest.raises(ConfigError, match="ranks have different numbers of batches"):
        trainer.predict(model, DataLoader(model.data(5), batch_size=1))


def test_balance_needs_shared_experts() -> None:
    with pytest.raises(ConfigError, match="ExpertBalance shows how ranks share tokens"):
        fit(Listed(), "auto", 1, callbacks=[ExpertBalance()])


def test_hooks_cannot_read_listed_experts_in_shards() -> None:
    with pytest.raises(ConfigError, match="of an expert in a list, are read outside of autograd"):
        fit(Listed(), sharing(zero_stage=3), callbacks=[Seen()])


def test_a_wrong_gradient_of_routers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial would see what a loss does not: gradients that are not divided by the ranks."""

    def undivided(self: Routes, *tensors: Tensor) -> list[Tensor]:
        return self._exchange(self.received, self.sent, 1.0, tensors)

    monkeypatch.setattr(Routes, "to_tokens", undivided)
    with pytest.raises(ConfigError, match=r"than with all on one: the gradient of"):
        fit(Listed(), sharing())
