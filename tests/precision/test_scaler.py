"""The loss scale as a tensor that stays on its device."""

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_shard.precision.plugins import device_scale


def test_the_scale_is_that_of_the_step_and_nobody_reads_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    first = device_scale(plugin)  # before anything is scaled
    loss = torch.ones((), requires_grad=True)
    scaler.scale(loss).backward()
    second = device_scale(plugin)
    optimizer = torch.optim.SGD([loss], lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    third = device_scale(plugin)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [float(one) for one in (first, second, third)] == [256.0, 256.0, 512.0]
    assert [tuple(one.shape) for one in (first, second, third)] == [(), (), ()]
    assert float(third) == scaler.get_scale()


def test_a_scaler_that_is_off_has_none() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert device_scale(MixedPrecision("16-mixed", device="cpu", scaler=scaler)) is None
