"""Frozen weights made of several tensors under Fabric."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from tests.fabric.nets import STAGES, assert_close, on_one, on_ranks
from tests.strategies.test_quantised import WIDTH, Headed, Several


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(Headed() for _ in range(2)))


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.plain() if isinstance(v, Several) else v.clone() for k, v in state.items()}


def trained(fabric: Fabric) -> Any:
    module = network()
    adapters = [one for one in module.parameters() if one.requires_grad]
    model, optimizer = fabric.setup(module, torch.optim.SGD(adapters, lr=0.1))
    batches = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for batch in batches:
        own = batch.chunk(fabric.world_size)[fabric.global_rank]
        fabric.backward(model(own).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    end = {name: value.detach().clone() for name, value in model.state_dict().items()}
    before = plain(end)
    with torch.no_grad():
        for one in adapters:
            one.zero_()
    model.load_state_dict(end)
    return before, plain(model.state_dict())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_base_made_of_several_tensors_trains_and_loads(stage: str) -> None:
    """It was refused as trained, which it was not."""
    got = on_ranks(stage, trained)
    assert_close(got, on_one(trained))
    assert_close(got[1], got[0])


def first_state(fabric: Fabric) -> Any:
    module = network()
    adapters = [one for one in module.parameters() if one.requires_grad]
    model, _ = fabric.setup(module, torch.optim.SGD(adapters, lr=0.1))
    return plain(model.state_dict())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_before_the_first_step_has_it_in_full(stage: str) -> None:
    """Integers were taken for other ranks' parameters until a unit was resharded."""
    assert_close(on_ranks(stage, first_state), on_one(first_state))
