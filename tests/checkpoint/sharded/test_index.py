"""Keys of optimizers' states that are no texts, through a folder and back."""

import enum
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import ZeRO2Strategy
from lightning_shard.checkpoint.background_saves import write_folder
from lightning_shard.checkpoint.conversion.consolidating import Consolidation, consolidate
from lightning_shard.checkpoint.sharded.folder import StoredFolder, key_of, text_of, with_keys
from lightning_shard.errors import CheckpointError
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.schemes import OfRanks

pytestmark = ignoring()


class Kind(enum.Enum):
    SLOW = "slow"


class Level(enum.IntEnum):
    LOW = 1


TEXTS = {
    "momentum": "momentum",
    "a.b": "a.b",
    "~7": "~'~7'",
    7: "~7",
    True: "~True",
    None: "~None",
    -0.5: "~-0.5",
    b"k": "~b'k'",
    (1, ("a", b"b")): "~(1, ('a', b'b'))",
}
OBJECTS = [Kind.SLOW, Level.LOW, (Level.LOW, 2), frozenset({1}), float("inf"), torch.float32]


def unpickled(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def test_each_key_has_a_text_of_its_own() -> None:
    nested = with_keys({"state": dict.fromkeys(TEXTS, 0), "groups": [{7: {b"k": 1}}]}, text_of)
    assert list(nested["state"]) == list(TEXTS.values())
    assert nested["groups"] == [{"~7": {"~b'k'": 1}}]
    back = [key_of(text, unpickled) for text in TEXTS.values()]
    assert [(one, type(one)) for one in back] == [(one, type(one)) for one in TEXTS]


@pytest.mark.parametrize("key", OBJECTS)
def test_objects_are_keys_as_well(key: Any) -> None:
    found = key_of(text_of(key), unpickled)
    assert (found, type(found)) == (key, type(key))
    assert text_of(key) == text_of(key)  # as another rank writes it


def test_a_text_that_somebody_else_has_written_stays() -> None:
    assert key_of("~x y", unpickled) == "~x y"


class WithKeys(torch.optim.SGD):
    """Keeps tensors and numbers under keys of several kinds."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            group[7] = group.get(7, 0) + 1
            for param in group["params"]:
                held = self.state[param]
                held[(1, "a")] = held.get((1, "a"), torch.zeros_like(param)) + 1
                held["counts"] = {Kind.SLOW: held.get("counts", {Kind.SLOW: 0})[Kind.SLOW] + 1}
        self.state[b"own"] = self.state.get(b"own", 0) + 1
        return result


class Keeps(OfRanks):
    def configure_optimizers(self) -> Any:
        return WithKeys(self.parameters(), 0.1, momentum=0.9)


def fit(epochs: int, path: Path | None = None) -> Any:
    trainer = quiet_trainer(
        strategy=ZeRO2Strategy(backend="in_process", checkpoint_format="sharded"), devices=2,
        max_epochs=epochs, max_steps=-1, accumulate_grad_batches=1, gradient_clip_val=None,
    )  # fmt: skip
    trainer.fit(Keeps(), ckpt_path=path, weights_only=False)
    return trainer


@pytest.mark.slow
def test_a_resumed_run_finds_what_was_kept_under_a_tuple(tmp_path: Path) -> None:
    """It came back under `"(1, 'a')"`; the run began anew, and its next save was refused."""
    fit(1).save_checkpoint(tmp_path / "run")
    trainer = fit(2, tmp_path / "run")
    trainer.save_checkpoint(tmp_path / "run")
    consolidate(tmp_path / "run", tmp_path / "full.ckpt", Consolidation(trust=True))
    (state,) = torch.load(tmp_path / "full.ckpt", weights_only=False)["optimizer_states"]
    steps = trainer.global_step
    assert state["state"].pop(b"own") == state["param_groups"][0][7] == steps
    for held in state["state"].values():
        assert held["counts"] == {Kind.SLOW: steps}
        assert set(held) == {"momentum_buffer", (1, "a"), "counts"}
        assert torch.equal(held[(1, "a")], torch.full_like(held["momentum_buffer"], steps))


def test_a_key_that_is_an_object_is_loaded_by_who_trusts_it(tmp_path: Path) -> None:
    state = {"optimizer_0": {"state": {Kind.SLOW: torch.ones(2)}}}
    write_folder(tmp_path / "run", state, {}, None)
    found = StoredFolder(tmp_path / "run", weights_only=False).nested("optimizer_0")
    assert list(found["state"]) == [Kind.SLOW]
    with pytest.raises(CheckpointError, match=r"A key of 'opt.* pass weights_only=False"):
        StoredFolder(tmp_path / "run", weights_only=True).nested("optimizer_0")
