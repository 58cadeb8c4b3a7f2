"""Parameters of one element train and are edited as on one device, whatever their shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.data_parallel.test_gradients_in_hooks import EDITS, GPT, SCHEMES
from tests.strategies.parity import GlobalBatches, ignoring
from tests.strategies.trainer.test_weight_averaging import SINGLE, Scheme

pytestmark = ignoring(".*microbatches are fewer than the")
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


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("name", "edit"), EDIT_CASES)
def test_a_gradient_of_one_element_could_not_be_scaled_by_a_tensor(name: str, edit: str) -> None:
    """`torch.nn.utils.clip_grad_norm_` of a model with a bias of one element was refused."""
    for got, expected in zip(trained(SCHEMES[name], edit), trained(SINGLE, edit), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam)


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
