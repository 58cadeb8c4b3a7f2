"""Parameters that part between ranks are told of; those of one element train as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard import ConfigError
from lightning_shard.data_parallel.memory import equal_weights
from tests.strategies.data_parallel.test_gradients_in_hooks import EDITS, GPT, SCHEMES
from tests.strategies.parity import GlobalBatches, ignoring, quiet_trainer
from tests.strategies.styles import Automatic
from tests.strategies.trainer.test_weight_averaging import SINGLE, Scheme

pytestmark = ignoring()
Edit = Callable[["Edited"], None]


class Edited(Automatic):
    """A hook changes parameters after the second batch."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.edit = edit

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.global_step == 2:
            self.edit(self)


def generator(model: Edited) -> torch.Generator:
    return torch.Generator().manual_seed(model.global_rank)


def drawn(model: Edited) -> None:
    nn.init.normal_(model.net.head.weight, generator=generator(model))


def assigned(model: Edited) -> None:
    weight = model.net.head.weight
    weight.data = torch.randn(weight.shape, generator=generator(model), dtype=weight.dtype)


def replaced(model: Edited) -> None:
    shape = model.net.head.weight.shape
    model.net.head.weight = nn.Parameter(torch.randn(shape, generator=generator(model)))


def on_one_rank(model: Edited) -> None:
    if model.global_rank == 1:
        with torch.no_grad():
            model.net.head.weight.mul_(0.5)


def past_version_counters(model: Edited) -> None:
    model.net.head.weight.data.normal_(generator=generator(model))


def alike(model: Edited) -> None:
    nn.init.normal_(model.net.head.weight, generator=torch.Generator().manual_seed(3))
    model.net.head.bias.data = torch.ones_like(model.net.head.bias)


def rounded_otherwise(model: Edited) -> None:
    with torch.no_grad():
        model.net.head.weight.mul_(1 + 1e-6 * model.global_rank)


def train(edit: Edit, **options: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Edited(edit)
    quiet_trainer(max_epochs=3, **options).fit(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:'net.head.weight' was replaced by another parameter")
@pytest.mark.parametrize("edit", [drawn, assigned, replaced, on_one_rank])
def test_edits_of_a_ranks_own_that_part_the_weights_are_told(edit: Edit) -> None:
    """Edits of a rank's own parted the weights without a word."""
    with pytest.raises(ConfigError, match=r"ranks have different values of 'net\.head\.weight'"):
        train(edit, strategy="shard_ddp_in_process", devices=2)


def test_edits_past_version_counters_are_found_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_weights, "_COMPARE_EVERY", 5)
    with pytest.raises(ConfigError, match=r"different values of 'net\.head\.weight', expected"):
        train(past_version_counters, strategy="shard_ddp_in_process", devices=2)


@pytest.mark.parametrize("edit", [alike, rounded_otherwise])
def test_equal_edits_go_on(edit: Edit) -> None:
    expected = train(edit)
    for name, value in train(edit, strategy="shard_ddp_in_process", devices=2).items():
        torch.testing.assert_close(value, expected[name])


NUM_STEPS = 3
ONE = torch.tensor
EDITS_OF_ONE: dict[str, Callable[[nn.Parameter], Any]] = {
    "nothing": lambda param: None,
    "times a number of no dimension": lambda param: param.grad.mul_(ONE(0.5)),
    "times a tensor of its shape": lambda param: param.grad.mul_(torch.full(param.shape, 0.5)),
    "plus a number": lambda param: param.grad.add_(ONE(0.1)),
    "compared with a number": lambda param: param.grad.clamp_(max=ONE(1e-3)),
    "between": lambda param: param.grad.copy_(torch.lerp(param.grad, param.data, ONE(0.5))),
    "foreach by a tensor": lambda param: torch._foreach_mul_([param.grad], ONE(0.5)),
    "weight": lambda param: param.data.mul_(ONE(0.9)),
    "weight of its norm": lambda param: param.data.div_(param.data.norm() + 1),
} | {name: edit for name, edit in EDITS.items() if name != "whole"}


class OfOneElement(GPT):
    """The loss has factors and terms of one element in each shape."""

    def __init__(self, edit: str, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.edit, self.optimizer = edit, optimizer
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.tensor([0.5]))
        self.matrix = nn.Parameter(torch.tensor([[2.0]]))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.factor * self.row.sum() + self.matrix.square().sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in (self.factor, self.row, self.matrix):
            EDITS_OF_ONE[self.edit](param)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.1)


def trained(
    scheme: Scheme, edit: str, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
) -> list[Tensor]:
    torch.manual_seed(7)
    model = OfOneElement(edit, optimizer)
    scheme.trainer(max_steps=NUM_STEPS, accumulate_grad_batches=1, gradient_clip_val=None).fit(
        model, datamodule=GlobalBatches(model, NUM_STEPS)
    )
    return [one.detach().clone() for one in (model.factor, model.row, model.matrix)]


EDIT_CASES = [(name, edit) for edit in EDITS_OF_ONE for name in SCHEMES]


@pytest.mark.filterwarnings("ignore:.*microbatches are fewer than the")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "edit"), EDIT_CASES)
def test_a_gradient_of_one_element_is_scaled_by_a_tensor(name: str, edit: str) -> None:
    """`torch.nn.utils.clip_grad_norm_` of a model with a bias of one element was refused."""
    for got, expected in zip(trained(SCHEMES[name], edit), trained(SINGLE, edit), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam)


@pytest.mark.filterwarnings("ignore:.*microbatches are fewer than the")
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEMES)
def test_parameters_of_one_element_are_optimized(
    name: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    for got, expected in zip(
        trained(SCHEMES[name], "nothing", optimizer),
        trained(SINGLE, "nothing", optimizer),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
