"""Folders of loops around FSDP2, of torchtitan and of `dcp.save` are taken apart, and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from lightning_shard.checkpoint.background_saves import write_folder
from lightning_shard.checkpoint.sharded.entries import parts_of
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor
from lightning_shard.errors import CheckpointError
from tests.checkpoint.sharded.peers import Peer, peer, stepped
from tests.checkpoint.sharded.runs import LAYOUTS, fit, quiet_trainer
from tests.checkpoint.sharded.test_peers import OneGroup
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`", ".*in a single process")


def test_names_are_taken_apart(tmp_path: Path) -> None:
    names = ("model", "average", *(f"optimizer_{number}" for number in (10, 2, "adam")))
    state = {name: {name: torch.ones(1)} for name in names}
    write_folder(tmp_path, state, {}, None)
    weights, optimizers, others = parts_of(StoredFolder(tmp_path))
    assert (list(weights), list(others)) == (["model"], ["average"])
    keys = [next(key for key in one if key.startswith("optimizer")) for one in optimizers]
    assert keys == ["optimizer_adam", "optimizer_2", "optimizer_10"]


def test_weights_at_the_top_are_the_tensors(tmp_path: Path) -> None:
    state = {"encoder": {"weight": torch.ones(1), "name": "x"}, "bias": torch.ones(2), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path)
    weights, optimizers, others = parts_of(StoredFolder(tmp_path))
    assert set(weights) == {"encoder.weight", "bias"}
    assert all(isinstance(one, StoredTensor) for one in weights.values())
    assert (optimizers, others) == ([], {"step": 3})


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)


def flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def titan(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    rest = {"lr_scheduler": {"last_epoch": 2}, "train_state": {"step": torch.tensor(2)}}
    return {**get_model_state_dict(model), "optimizer": flattened(model, optimizer), **rest}


FORMS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]] = {
    "a loop": lambda m, o: {"model": get_model_state_dict(m), "optimizer": nested(m, o)},
    "an object": lambda m, o: {"app": {"model": get_model_state_dict(m), "optim": nested(m, o)}},
    "a list": lambda m, o: {"model": get_model_state_dict(m), "optimizers": [nested(m, o)]},
    "flattened": lambda m, o: {"model": get_model_state_dict(m), "optimizer": flattened(m, o)},
    "torchtitan": titan,
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_a_loop_has_optimizers(form: str, tmp_path: Path) -> None:
    """A folder of a loop was one without optimizers."""
    begun = peer()
    optimizer = stepped(begun)
    dcp.save(FORMS[form](begun, optimizer), checkpoint_id=tmp_path)
    alone, model = OneGroup(), OneGroup()
    alone.load_state_dict(begun.state_dict())
    alone.begun = optimizer.state_dict()
    fit("auto", alone, max_steps=1)
    with pytest.warns(UserWarning, match="nothing of a Trainer's"):
        fit(LAYOUTS["zero3-3"](), model, ckpt_path=tmp_path, max_steps=1)
    torch.testing.assert_close(model.losses, alone.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-5, atol=1e-6)


class TwoGroups(OneGroup):
    """The model with the same Adam, in two groups of other options."""

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        first, *rest = self.parameters()
        return torch.optim.Adam([{"params": [first]}, {"params": rest, "lr": 0.5}])


def test_flattened_groups_are_put_together_as_the_optimizers(tmp_path: Path) -> None:
    begun = peer()
    optimizer = stepped(begun)
    dcp.save(titan(begun, optimizer), checkpoint_id=tmp_path)
    model = TwoGroups()
    with pytest.warns(UserWarning, match="nothing of a Trainer's"):
        fit(LAYOUTS["zero3-3"](), model, ckpt_path=tmp_path, max_steps=1)
    (made,) = model.trainer.optimizers
    assert [group["lr"] for group in made.param_groups] == [1e-2, 1e-2]


def test_flattened_groups_that_do_not_fit_are_told(tmp_path: Path) -> None:
    begun = peer()
    state = flattened(begun, stepped(begun))
    state["param_groups.head.bias.lr"] = 0.5
    dcp.save({"model": get_model_state_dict(begun), "optimizer": state}, checkpoint_id=tmp_path)
    with (
        pytest.raises(CheckpointError, match="expected the same for what is in one group"),
        pytest.warns(UserWarning, match="nothing of a Trainer's"),
    ):
        fit(LAYOUTS["zero3-3"](), OneGroup(), ckpt_path=tmp_path, max_steps=1)


def test_weights_that_dcp_has_saved_alone_are_evaluated(tmp_path: Path) -> None:
    class Validated(Peer):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    begun = peer()
    stepped(begun)
    dcp.save(begun.state_dict(), checkpoint_id=tmp_path)
    model = Validated()
    trainer = quiet_trainer(LAYOUTS["zero3-3"](), limit_val_batches=1)
    trainer.validate(model, ckpt_path=tmp_path, verbose=False)
    torch.testing.assert_close(model.state_dict(), begun.state_dict(), rtol=0, atol=0)
