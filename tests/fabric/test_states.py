"""States of what Fabric has set up: asked for, loaded, saved and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_shard.errors import CheckpointError, ConfigError
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

each_stage = pytest.mark.parametrize("stage", STAGES)
each_format = pytest.mark.parametrize("kind", ["full", "sharded"])


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[float]:
    norms = []
    for number in steps:
        fabric.backward(model(batch_of(fabric, number)).square().mean())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    module = Net()
    return fabric.setup(module, adam(module))


def straight(fabric: Fabric) -> Any:
    """Train six steps; return the last norms, and the weights."""
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, range(3))
    return train(fabric, model, optimizer, range(3, 6)), weights_of(model)


@pytest.mark.few_cases(1)
@each_stage
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_state_dicts_are_full_on_every_rank_and_load_back(stage: str, precision: str) -> None:
    def loop(fabric: Fabric) -> Any:
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, range(3))
        state, states = weights_of(model), optimizer.state_dict()
        head, body = model.head.state_dict(), model.module.blocks.state_dict()
        told = fabric.broadcast(state)
        assert_close(state, told)
        assert type(state["head.weight"]) is torch.Tensor
        assert_close(head, {"weight": state["head.weight"], "bias": state["head.bias"]})
        assert_close(body["0.weight"], state["blocks.0.weight"])
        first = train(fabric, model, optimizer, range(3, 6))
        assert list(model.load_state_dict(state)) == [[], []]
        optimizer.load_state_dict(states)
        assert_close(train(fabric, model, optimizer, range(3, 6)), first)
        return states["state"][0]["exp_avg"].shape

    assert on_ranks(stage, loop, precision=precision) == (6, 4)


@pytest.mark.few_cases(1)
@each_stage
def test_a_wrong_state_is_refused_and_changes_nothing(stage: str) -> None:
    def loop(fabric: Fabric) -> None:
        model, optimizer = set_up(fabric)
        before = weights_of(model)
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**before, "head.bias": torch.zeros(3)})
        with pytest.raises(CheckpointError, match="groups of"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        assert_close(weights_of(model), before)
        assert len(train(fabric, model, optimizer, range(2))) == 2

    on_ranks(stage, loop)


@pytest.mark.few_cases(1)
@each_stage
@each_format
def test_a_save_is_resumed(stage: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"

    def first(fabric: Fabric) -> None:
        model, optimizer = set_up(fabric)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(fabric, model, optimizer, range(3))
        state = {"model": model, "optimizer": optimizer, "step": 3, "schedules": [schedule]}
        fabric.save(path, {**state, "more": {"name": "x"}})

    def second(fabric: Fabric) -> Any:
        model, optimizer = set_up(fabric)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with torch.no_grad():
            model.head.weight.zero_()
        state = {"model": model, "optimizer": optimizer, "step": 0, "schedules": [schedule]}
        assert fabric.load(path, state) == {"more": {"name": "x"}}
        assert state["step"] == 3
        return train(fabric, model, optimizer, range(3, 6)), weights_of(model)

    on_ranks(stage, first, checkpoint_format=kind)
    assert path.is_dir() == (kind == "sharded")
    expected = on_one(straight)
    assert_close(on_ranks(stage, second, devices=4), expected)
    assert_close(on_ranks("zero3", second, checkpoint_format="sharded"), expected)


@each_format
def test_a_state_of_two_models_in_lists(kind: str, tmp_path: Path) -> None:
    def loop(fabric: Fabric, trained: bool) -> Any:
        pairs = [set_up(fabric), set_up(fabric)]
        models, optimizers = [one for one, _ in pairs], [one for _, one in pairs]
        state = {"nets": models, "optimizers": {"a": optimizers[0], "b": optimizers[1]}}
        if trained:
            for number, pair in enumerate(pairs):
                train(fabric, *pair, range(number, number + 3))
            fabric.save(tmp_path / "saved", state)
        else:
            fabric.load(tmp_path / "saved", state)
        told = [train(fabric, *pair, range(3, 5)) for pair in pairs]
        return told, [weights_of(model) for model in models]

    expected = on_ranks("zero2", loop, True, checkpoint_format=kind)
    assert_close(on_ranks("zero3", loop, False), expected)


def test_a_full_file_is_torchs_and_is_loaded_before_the_set_up(tmp_path: Path) -> None:
    def save(fabric: Fabric) -> Any:
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, range(3))
        fabric.save(
            tmp_path / "file",
            {"model": model, "optimizer": optimizer},
            filter={"model": lambda name, value: "head" not in name and value.numel() > 0},
        )
        fabric.save(tmp_path / "raw", {"model": model})
        return weights_of(model)

    def load(fabric: Fabric) -> Any:
        net = Net()
        fabric.load(tmp_path / "raw", {"model": net})
        model = fabric.setup_module(net)
        other = fabric.setup_module(Net())
        if fabric.is_global_zero:
            torch.save(torch.load(tmp_path / "raw")["model"], tmp_path / "one")
        fabric.barrier()
        fabric.load_raw(tmp_path / "one", other)
        assert_close(weights_of(other), weights_of(model))
        return weights_of(model)

    weights = on_ranks("zero3", save)
    file = torch.load(tmp_path / "file")
    assert not any("head" in name for name in file["model"])
    assert_close(file["model"]["entrance.weight"], weights["entrance.weight"])
    assert file["optimizer"]["state"][0]["exp_avg"].shape == (6, 4)
    assert_close(on_ranks("zero3", load), weights)


@each_format
def test_a_checkpoint_without_a_state_is_returned_full(kind: str, tmp_path: Path) -> None:
    def loop(fabric: Fabric) -> Any:
        model, optimizer = set_up(fabric)
        train(fabric, model, optimizer, range(1))
        fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer, "step": 1})
        whole = fabric.load(tmp_path / "saved")
        assert set(whole) == {"model", "optimizer", "step"}
        assert_close(dict(whole["model"]), weights_of(model))
        return len(whole["optimizer"]["state"])

    assert on_ranks("zero3", loop, checkpoint_format=kind) == len(list(Net().parameters()))


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    def loop(fabric: Fabric) -> None:
        model, optimizer = set_up(fabric)
        fabric.save(tmp_path / "saved", {"model": model})
        other = fabric.setup_module(nn.Linear(2, 2))
        with pytest.raises(CheckpointError, match="Linear"):
            fabric.load(tmp_path / "saved", {"model": other})
        with pytest.raises(KeyError, match="optimizer"):
            fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        with pytest.raises(CheckpointError):
            fabric.load(tmp_path / "missing", {"model": model})
        fabric.strategy.checkpoint_format = "sharded"
        with pytest.raises(ConfigError, match="without a filter"):
            fabric.save(tmp_path / "folder", {"model": model}, filter={"model": lambda *_: True})

    on_ranks("zero3", loop)
