"""An out-of-memory error says what its rank held, by kind, and what would hold less."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_shard import (
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.strategies.memory_notes import (
    Situation,
    is_out_of_memory,
    savings,
    told_of_memory,
)
from tests.strategies.matrix_optimizers import Muon, matrices
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import SMALL_BUCKET_MB, GlobalBatches, ignoring, quiet_trainer
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring(r".* microbatches are fewer than the .* stages")
SLOW = pytest.mark.slow
RANKS: dict[str, Any] = {"backend": "in_process", "announce": False}
STEP = 2  # in which memory ends, as the optimizer has state
KIB = 1024


def of_the_host() -> RuntimeError:
    """Return torch's error where a host's memory ends."""
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        return error
    raise AssertionError


def of_a_device() -> RuntimeError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Full(ExampleGPT):
    """Memory ends at one place of one step."""

    place = ""
    error: Callable[[], RuntimeError] = staticmethod(of_the_host)

    def end(self, place: str) -> None:
        if place == self.place and self.trainer.global_step == STEP:
            raise type(self).error()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.end("forward")
        return loss

    def backward(self, loss: Tensor, *args: Any) -> None:  # type: ignore[override]
        super().backward(loss, *args)
        self.end("backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.end("optimizer")


def note_of(
    strategy: Any, place: str, num_ranks: int = 2, error: Any = of_the_host, of: Any = Full
) -> str:
    """Return what a fit's out-of-memory error has been told."""
    model = type("Model", (of,), {"place": place, "error": staticmethod(error)})()
    trainer = quiet_trainer(
        strategy=strategy, devices=num_ranks, max_steps=STEP + 2, accumulate_grad_batches=1
    )
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(model, datamodule=GlobalBatches(model, num_steps=STEP + 2))
    assert type(caught.value) is type(error())
    (note,) = [one for one in caught.value.__notes__ if one.startswith("Out of memory")]
    return note


def size(note: str, kind: str) -> float:
    """Return how many KiB a note says of a kind."""
    found = re.search(rf"{re.escape(kind)} ([\d.]+) (B|KiB|MiB)", note)
    assert found, (kind, note)
    return float(found[1]) * {"B": 1 / KIB, "KiB": 1, "MiB": KIB}[found[2]]


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=SLOW), "optimizer"])
def test_kinds_and_advice_under_zero2(place: str) -> None:
    note = note_of(ZeRO2Strategy(**RANKS), place)
    where = {"forward": "training_step", "optimizer": "optimizer_step"}.get(place, place)
    assert re.match(rf"Out of memory in {where}\. Rank \d of 2 held ", note)
    assert size(note, "parameters") == pytest.approx(215.12, rel=0.01)
    assert size(note, "optimizer state") == pytest.approx(215.12, rel=0.01)
    assert size(note, "gradients") == pytest.approx(107.56, rel=0.01)
    assert "process of" in note
    if place != "forward":  # where the step asks for its trainer, which no dry run has
        assert re.search(r"activation_checkpointing='full' \(.*\): 3\d\d\.\d\d KiB less", note)
    assert "half the batch size" in note
    assert "strategy='zero3'" not in note  # the largest units take what shards save
    assert "offload='optimizer' (state and gradients in host memory): 322" in note
    assert "offload='parameters'" not in note  # of stage 3 alone


@SLOW
def test_a_lower_stage_names_the_higher_ones() -> None:
    note = note_of(DDPStrategy(**RANKS), "backward", error=of_a_device)
    assert re.search(r"strategy='zero1' \(optimizer state in shards, too\): 215\.\d\d KiB", note)
    assert re.search(r"strategy='zero2' \(gradients in shards, too\): 322\.\d\d KiB", note)


@SLOW
def test_units_that_are_full_under_stage_3() -> None:
    note = note_of(ZeRO3Strategy(**RANKS, bucket_mb=SMALL_BUCKET_MB), "backward")
    assert size(note, "parameters") == pytest.approx(107.56, rel=0.02)
    assert "strategy='zero" not in note


@contextmanager
def gathers_that_fail() -> Iterator[None]:
    begin = FlatParameters.begin_unshard
    seen: dict[FlatParameters, None] = {}

    def failing(flat: FlatParameters) -> Any:
        ranks = flat.groups.dp.group
        others = [one for one in seen if one is not flat and one.groups.dp.group is ranks]
        if flat in seen and any(one.is_unsharded for one in others):
            raise of_the_host()
        seen[flat] = None
        return begin(flat)

    with patch.object(FlatParameters, "begin_unshard", failing):
        yield


def test_memory_ends_in_a_gather() -> None:
    with gathers_that_fail():
        note = note_of(ZeRO3Strategy(**RANKS, bucket_mb=SMALL_BUCKET_MB), "")
    assert re.match(r"Out of memory in (training_step|backward|optimizer_step)\. Rank", note)
    assert size(note, "gathered units") > 0


@SLOW
@pytest.mark.parametrize(
    ("num_ranks", "strategy", "words"),
    [
        (2, lambda: ZeRO1Strategy(**RANKS), "strategy='zero2'"),
        (2, lambda: PipelineParallelStrategy(**RANKS, num_microbatches=3), "num_microbatches=6"),
        (
            2,
            lambda: TensorParallelStrategy(**RANKS, plan=PLANS["gpt"]),
            "activation_checkpointing='full' (activations of blocks)",
        ),
        (
            4,
            lambda: HybridParallelStrategy(
                **RANKS, pipeline_parallel_size=2, num_microbatches=3, zero_stage=0
            ),
            "zero_stage=1 (optimizer state in shards, too)",
        ),
    ],
)
def test_advice_of_other_strategies(num_ranks: int, strategy: Any, words: str) -> None:
    assert words in note_of(strategy(), "backward", num_ranks)


class FullMuon(Muon):
    """Memory may end in a step of its, once that has orthogonalised matrices."""

    ends = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.ends:
            raise of_the_host()
        return loss


class WithMuon(Full):
    def configure_optimizers(self) -> Any:
        inner, rest = matrices(self)
        groups = [{"params": inner, "use_muon": True}, {"params": rest, "use_muon": False}]
        return FullMuon(groups, torch.float32)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.ends = self.trainer.global_step == STEP


@pytest.mark.slow
def test_what_an_owner_gathers_for_its_update_is_told() -> None:
    """What an owner gathers for its update was not told."""
    strategy = TensorParallelStrategy(**RANKS, plan=PLANS["gpt"])
    note = note_of(strategy, "", of=WithMuon)
    assert note.startswith("Out of memory in optimizer_step. Rank")
    inner, _ = matrices(WithMuon())
    owned = 2 * 4 * sum(param.numel() for param in inner) / 2  # and gradients, on one of two ranks
    gathered = size(note, "matrices gathered while an optimizer updates them")
    assert gathered == pytest.approx(owned / KIB, rel=0.2)  # owners are chosen by size


def test_no_other_error_is_told_anything() -> None:
    with pytest.raises(RuntimeError) as caught, told_of_memory("backward", lambda: "never"):
        raise RuntimeError("shapes differ")
    assert not getattr(caught.value, "__notes__", [])


def test_nested_places_tell_once() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        told_of_memory("optimizer_step", lambda: "outer"),
        told_of_memory("training_step", lambda: "inner"),
    ):
        raise of_a_device()
    assert caught.value.__notes__ == ["Out of memory in training_step. inner"]
    assert is_out_of_memory(of_the_host())


@pytest.mark.parametrize(
    ("stage", "offload", "expected"),
    [
        (2, None, ["offload='optimizer' (state and gradients in host memory): 10.00 KiB less"]),
        (3, "optimizer", ["offload='parameters' (shards, too): 14.00 KiB less"]),
        (3, "parameters", []),
        (0, None, []),
    ],
)
def test_offload_is_named_where_it_saves(stage: int, offload: Any, expected: list[str]) -> None:
    situation = Situation(
        held=HeldBytes(parameters=4 * KIB, gradients=2 * KIB, optimizer_state=8 * KIB),
        stage=stage,
        max_stage=3,
        num_shards=4,
        largest_units=0,
        options=("offload",),
        is_named_by_stage=False,
        checkpoints=True,
        offload=offload,
    )
    assert [one for one in savings(situation) if "offload" in one] == expected


def test_activation_offload_is_named_where_it_saves() -> None:
    def told(activations: tuple[int, int] | None, **options: Any) -> list[str]:
        situation = Situation(
            held=HeldBytes(parameters=0, gradients=0, optimizer_state=0),
            stage=0,
            max_stage=3,
            num_shards=1,
            largest_units=0,
            options=("activation_offload",),
            is_named_by_stage=False,
            checkpoints=True,
            activations=activations,
            **options,
        )
        return [one for one in savings(situation) if "offload" in one]

    name, gib = "activation_offload=True (activations in host memory)", 2**30
    assert told((2 * gib, gib)) == [f"{name}: 1.50 GiB less"]
    assert told(None) == [name]
    assert told((gib // 4, gib // 8)) == []  # as much may be on its way
    assert told((2 * gib, gib), offloads_activations=True) == []
