"""Options and settings beside the stages: each trains as a single device does."""

import copy
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from lightning_shard.data_parallel.offload.activations import HostActivations
from tests.fabric.nets import (
    STAGES,
    Net,
    adam,
    assert_close,
    batch_of,
    on_one,
    on_ranks,
    weights_of,
)


def trained(fabric: Fabric) -> Any:
    module = Net()
    model, optimizer = fabric.setup(module, adam(module))
    norms = []
    for number in range(4):
        fabric.backward(model(batch_of(fabric, number)).square().mean())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights_of(model)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_activation_checkpointing(stage: str) -> None:
    assert_close(on_ranks(stage, trained, activation_checkpointing="full"), on_one(trained))


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:activation_offload=.*saves nothing on CPU ranks")
@pytest.mark.parametrize("choice", [None, "full", "selective"])
@pytest.mark.parametrize("stage", STAGES)
def test_activation_offload(stage: str, choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostActivations, "in_flight_bytes", 2_000)
    options: dict[str, Any] = {"activation_offload": True, "activation_checkpointing": choice}
    assert_close(on_ranks(stage, trained, **options), on_one(trained))


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:offload=.*saves nothing on CPU ranks")
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        ("zero1", "optimizer"),
        ("zero2", "optimizer"),
        ("zero3", "optimizer"),
        ("zero3", "parameters"),
    ],
)
def test_offload(stage: str, offload: str) -> None:
    assert_close(on_ranks(stage, trained, offload=offload, prefetch=None), on_one(trained))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["shard_ddp", "zero2"])
def test_compression(stage: str) -> None:
    norms, weights = on_ranks(stage, trained, compression="bf16")
    expected = on_one(trained)
    torch.testing.assert_close(norms, expected[0], rtol=2e-2, atol=0)
    torch.testing.assert_close(weights, expected[1], rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at hooks' args
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_compiled_module(stage: str) -> None:
    def loop(fabric: Fabric) -> Any:
        module = Net()
        compiled = torch.compile(module, backend="eager")
        model, optimizer = fabric.setup(compiled, adam(module))
        for number in range(3):
            with fabric.no_backward_sync(model, enabled=number == 0):
                fabric.backward(model(batch_of(fabric, number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(module)

    assert_close(on_ranks(stage, loop), on_one(loop))


def scaled() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_scaled_loss(stage: str) -> None:
    """One rank's overflow has all ranks skip the step."""

    def loop(fabric: Fabric) -> Any:
        module = Net()
        model, optimizer = fabric.setup(module, adam(module))
        for number in range(4):
            loss = model(batch_of(fabric, number)).square().mean()
            if number == 1 and fabric.global_rank == fabric.world_size - 1:
                loss = loss * float("inf")
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        assert fabric.strategy.precision.scaler.get_scale() == 2.0**10
        return weights_of(model)

    got, expected = on_ranks(stage, loop, plugins=scaled()), on_one(loop, plugins=scaled())
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_plugins_may_be_used_again() -> None:
    plugin = scaled()
    first = on_ranks("zero2", trained, plugins=copy.deepcopy(plugin))
    assert_close(on_ranks("zero2", trained, plugins=plugin), first)
