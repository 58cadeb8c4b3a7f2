"""Models that are set up one after the other in one launch, as in a cross-validation."""

import gc
import weakref

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import lightning_shard.fabric  # noqa: F401  (its names)


@pytest.mark.slow
def test_every_module_ever_set_up_stayed_alive() -> None:
    """The strategy held each until the launch ended, and each backward went through all of them."""
    kept: list[nn.Module] = []

    def train(fabric: Fabric) -> int:
        alive = []
        for number in range(4):
            net = nn.Linear(4, 4)
            optimizer = torch.optim.Adam(net.parameters(), 0.1)
            model, stepping = fabric.setup(net, optimizer)
            fabric.backward(model(torch.ones(2, 4)).square().mean())
            stepping.step()
            alive.append(weakref.ref(net))
            if number == 1 and fabric.global_rank == 0:
                kept.append(net)  # it is given back full
            del net, optimizer, model, stepping
            gc.collect()
        return sum(one() is not None for one in alive)

    fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3_in_process")
    assert fabric.launch(train) == 2  # the last one, and what somebody keeps
    assert kept[0].weight.shape == (4, 4)
    assert len(fabric.strategy._held) == 0
