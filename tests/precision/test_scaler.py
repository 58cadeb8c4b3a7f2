"""The loss scale as a tensor that stays on its device."""

import torch

from lightning_shard.precision.scaler import device_scale


def test_the_scale_is_that_of_the_step_and_nobody_reads_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    first = device_scale(scaler)  # before anything is scaled
    loss = torch.ones((), requires_grad=True)
    scaler.scale(loss).backward()
    second = device_scale(scaler)
    optimizer = torch.optim.SGD([loss], lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    third = device_scale(scaler)
    assert first is not None
    assert second is not None
    assert third is not None
    assert [float(one) for one in (first, second, third)] == [256.0, 256.0, 512.0]
    assert [tuple(one.shape) for one in (first, second, third)] == [(), (), ()]
    assert float(third) == scaler.get_scale()


def test_a_scaler_that_is_off_has_none() -> None:
    assert device_scale(torch.amp.GradScaler("cpu", enabled=False)) is None
