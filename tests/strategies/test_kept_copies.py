"""Copies of modules that hooks keep beside the model, and what `on_save_checkpoint` reads."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_shard import ConfigError
from tests.strategies.decoders import DECODER_SCHEMES, WITHOUT_STAGES, Decoder, assert_as_alone
from tests.strategies.parity import ignoring
from tests.strategies.stacks import OfEveryRank, fit

pytestmark = ignoring(".*microbatches are fewer than the")


class KeptTeacher(Decoder):
    """A teacher of the head in a list, which torch does not see."""

    def on_train_start(self) -> None:
        self.kept = [copy.deepcopy(self.head).requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.hidden(self.embed(batch[0]))
        with torch.no_grad():
            taught = self.kept[0](x)
        return self.loss(batch) + (self.head(x) - taught).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, theirs in zip(self.head.parameters(), self.kept[0].parameters(), strict=True):
            self.move(theirs, mine)

    def move(self, theirs: nn.Parameter, mine: nn.Parameter) -> None:
        theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)


class AssignedTeacher(KeptTeacher):
    def move(self, theirs: nn.Parameter, mine: nn.Parameter) -> None:
        theirs.data = theirs.data * 0.9 + mine.data * 0.1


class SetTeacher(KeptTeacher):
    @torch.no_grad()
    def move(self, theirs: nn.Parameter, mine: nn.Parameter) -> None:
        theirs.set_((theirs * 0.9 + mine * 0.1).detach())


class SetInFullTeacher(KeptTeacher):
    @torch.no_grad()
    def move(self, theirs: nn.Parameter, mine: nn.Parameter) -> None:
        theirs.set_(self.full(theirs) * 0.9 + self.full(mine) * 0.1)

    def full(self, param: nn.Parameter) -> Tensor:
        return getattr(param, "full_tensor", param.clone)()


class WrittenTeacher(KeptTeacher):
    @torch.no_grad()
    def move(self, theirs: nn.Parameter, mine: nn.Parameter) -> None:
        torch.add(theirs * 0.9, mine, alpha=0.1, out=theirs)


_TEACHERS = [KeptTeacher, AssignedTeacher, SetTeacher, SetInFullTeacher, WrittenTeacher]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", WITHOUT_STAGES)
@pytest.mark.parametrize("style", _TEACHERS)
def test_a_teacher_that_torch_does_not_see_trains_as_on_one_device(
    style: type[Decoder], scheme: str
) -> None:
    """A teacher that torch does not see was a key error under tensor parallel."""
    assert_as_alone(style, scheme)


class CopiesCopies(KeptTeacher):
    """Keeps copies of a copy, which are used, moved and copied again; the last outlives the run."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        again = copy.deepcopy(self.kept[0])
        for mine, theirs in zip(self.kept[0].parameters(), again.parameters(), strict=True):
            self.move(mine, theirs)
            theirs.data.mul_(1.01)
        self.kept = [again]

    def on_train_end(self) -> None:
        self.kept.append(copy.deepcopy(self.kept[0]))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero3", *(one for one in WITHOUT_STAGES if one != "zero3")])
def test_copies_of_copies_are_as_on_one_device(scheme: str) -> None:
    """Under stage 3 a copy of a copy did not know of what it was a shard: a bare KeyError."""
    assert_as_alone(CopiesCopies, scheme)
    num_ranks, make = DECODER_SCHEMES[scheme]
    ours, alone = fit(CopiesCopies, make(), devices=num_ranks), fit(CopiesCopies)
    for mine, theirs in zip(ours.model.kept, alone.model.kept, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other)


class Pickles(Decoder):
    """Pickles its head in a hook, and a copy of it after the fit."""

    def on_train_start(self) -> None:
        self.kept = [copy.deepcopy(self.head)]
        self.kept.append(pickle.loads(pickle.dumps(self.head)))


@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2", "context"])
def test_a_module_and_copies_of_it_can_be_pickled_in_a_run_and_after_it(scheme: str) -> None:
    """A hook of the engine's could not be pickled, in the model as in its copies."""
    num_ranks, make = DECODER_SCHEMES[scheme]
    copied, loaded = fit(Pickles, make(), devices=num_ranks).model.kept
    for one in (copied, pickle.loads(pickle.dumps(copied))):
        for mine, theirs in zip(one.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(mine, theirs)


class Averaged(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_start(self) -> None:
        object.__setattr__(self, "average", AveragedModel(self.head))

    def on_train_epoch_end(self) -> None:
        self.average.update_parameters(self.head)
        self.seen.append(
            sum(float(one.detach().double().abs().sum()) for one in self.average.parameters())
        )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2", "zero3", "tensor", "context"])
def test_an_averaged_model_of_a_split_layer_is_one_devices(scheme: str) -> None:
    """An averaged model of a split layer was a key error."""
    num_ranks, make = DECODER_SCHEMES[scheme]
    of_ranks = OfEveryRank()
    fit(Averaged, make(), [of_ranks], devices=num_ranks)
    alone = fit(Averaged)
    assert of_ranks.ranks == [pytest.approx(alone.model.seen, rel=1e-9)] * num_ranks


class SumsWeights(Decoder):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sums"] = [float(one.sum()) for one in checkpoint["state_dict"].values()]


class SumsOnRankZero(SumsWeights):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            super().on_save_checkpoint(checkpoint)


def save(style: type[Decoder], scheme: str, folder: Path) -> dict[str, Any]:
    num_ranks, make = DECODER_SCHEMES[scheme]
    saves = ModelCheckpoint(dirpath=folder, filename="end")
    fit(style, make(), [saves], devices=num_ranks, enable_checkpointing=True, max_epochs=1)
    loaded: dict[str, Any] = torch.load(folder / "end.ckpt")
    return loaded


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero3", "tensor", "pipeline"])
def test_asking_for_elements_of_a_checkpoint_on_every_rank_comes_with_advice(
    scheme: str, tmp_path: Path
) -> None:
    """Elements of a checkpoint's weights on other ranks were asked for without advice."""
    with pytest.raises(ConfigError, match=r"Rank 1: on_save_checkpoint asks for elements of"):
        save(SumsWeights, scheme, tmp_path / "all")
    got = save(SumsOnRankZero, scheme, tmp_path / "first")
    assert got["sums"] == pytest.approx([float(one.sum()) for one in got["state_dict"].values()])
