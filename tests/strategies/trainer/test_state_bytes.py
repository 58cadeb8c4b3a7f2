"""The bytes of an optimizer's state, told before it has any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_shard.strategies.trainer.announcement import expected_state_bytes

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params),
    "amsgrad": lambda params: optim.AdamW(params, amsgrad=True),
    "fused": lambda params: optim.AdamW(params, fused=True),
    "rmsprop": lambda params: optim.RMSprop(params, momentum=0.1, centered=True),
    "adagrad": lambda params: optim.Adagrad(params),
    "nadam": lambda params: optim.NAdam(params),
    "asgd": lambda params: optim.ASGD(params),
    "rprop": lambda params: optim.Rprop(params),
}


class Mine(optim.SGD):
    pass


def parameters() -> list[nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(5, 7), (11,), (2, 3, 4), ()]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    return [*params, nn.Parameter(torch.ones(6, dtype=torch.bfloat16))]


@pytest.mark.parametrize("name", MAKERS)
def test_it_is_what_the_state_takes_after_a_step(name: str) -> None:
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    optimizer = MAKERS[name](groups)
    expected = expected_state_bytes(optimizer, {param: param.data for param in params})
    assert all((param == 1).all() for param in params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    entries = [value for state in optimizer.state.values() for value in state.values()]
    assert expected == sum(value.nbytes for value in entries if isinstance(value, Tensor))


def test_only_what_a_rank_sees_is_counted() -> None:
    first, second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = optim.SGD([first, second], lr=0.1, momentum=0.9)
    assert expected_state_bytes(optimizer, {first: first.data[:3]}) == 12
    assert expected_state_bytes(optimizer, {first: first.data[:0]}) == 0
    second.requires_grad_(False)
    assert expected_state_bytes(optimizer, {second: second.data}) == 0


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor, Mine])
def test_state_that_cannot_be_told_is_none(kind: Any) -> None:
    param = nn.Parameter(torch.ones(3, 4))
    assert expected_state_bytes(kind([param]), {param: param.data}) is None
