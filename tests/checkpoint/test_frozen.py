"""Checkpoints of what is trained alone: an adapter's are small, and its base stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import CheckpointError
from lightning_shard.checkpoint import arriving
from lightning_shard.checkpoint.conversion.source import open_source
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from tests.checkpoint.sharded.runs import LAYOUTS, Model, fit, saving
from tests.examples.commands import ignoring_advice

pytestmark = ignoring_advice("Be aware that when using `ckpt_path`")


class Adapted(Model):
    """A model most of which is frozen, and a buffer that is not."""

    def __init__(self, *, base: int = 0) -> None:
        torch.manual_seed(base)
        super().__init__()
        self.blocks.requires_grad_(False)
        torch.manual_seed(1)
        for param in self.parameters():
            if param.requires_grad:
                torch.nn.init.normal_(param, std=0.3)
        self.register_buffer("steps", torch.zeros(()))

    def on_train_batch_start(self, *_: Any) -> None:
        """Count the steps."""
        self.steps += 1


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("zero3-4", "tensor-4", "sharded"),
        pytest.param("hybrid-8", "zero3-3", "sharded", marks=pytest.mark.slow),
        ("zero3-4", "pipeline-2", "full"),
        ("tensor-4", "zero2-2", "full"),
    ],
)
def test_frozen_parameters_are_not_saved_and_keep_the_values_of_the_run_that_loads(
    before: str, after: str, kind: str, tmp_path: Path
) -> None:
    strategy = LAYOUTS[before](checkpoint_format=kind, save_trainable_only=True)
    path = saving(strategy, tmp_path, Adapted())
    frozen = {name for name, one in Adapted().named_parameters() if not one.requires_grad}
    assert len(frozen) == 9
    assert set(open_source(path).weights) == set(Adapted().state_dict()) - frozen
    expected = fit("auto", Adapted()).state_dict()
    resumed = fit(LAYOUTS[after](), Adapted(), ckpt_path=path).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_frozen_parameters_that_are_left_out_are_not_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen parameters were gathered to be left out."""
    gathered: list[str] = []
    bring = arriving.slices_of

    def slices_of(flat: FlatParameters, index: int, *args: Any) -> Any:
        gathered.append(flat.layout.slots[index].name)
        return bring(flat, index, *args)

    class Saving(Adapted):
        def on_train_end(self) -> None:
            monkeypatch.setattr(arriving, "slices_of", slices_of)
            self.trainer.save_checkpoint(tmp_path / "adapter.ckpt")
            monkeypatch.setattr(arriving, "slices_of", bring)

    fit(LAYOUTS["zero3-3"](save_trainable_only=True), Saving())
    frozen = {name for name, one in Adapted().named_parameters() if not one.requires_grad}
    assert gathered
    assert frozen.isdisjoint(gathered)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_only_frozen_parameters_may_be_missing(kind: str, tmp_path: Path) -> None:
    strategy = LAYOUTS["zero1-3"](checkpoint_format=kind, save_trainable_only=True)
    path = saving(strategy, tmp_path, Adapted())

    class Larger(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Parameter(torch.ones(2))

    with pytest.raises(CheckpointError, match=r"Missing key.*'extra'"):
        fit(LAYOUTS["zero3-3"](), Larger(), ckpt_path=path)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_other_readers_are_told_with_strict(kind: str, tmp_path: Path) -> None:
    strategy = LAYOUTS["zero1-3"](checkpoint_format=kind, save_trainable_only=True)
    path = saving(strategy, tmp_path, Adapted())
    with pytest.warns(UserWarning, match="not in the checkpoint: .*blocks"):
        loaded = Adapted.load_from_checkpoint(path, base=5, strict=False)
    assert torch.equal(loaded.blocks[0].up.weight, Adapted(base=5).blocks[0].up.weight)
    assert loaded.steps == 2
