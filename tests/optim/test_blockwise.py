"""Optimizers whose states lie in blocks train as on one device, and so do their checkpoints."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_shard import (
    CheckpointError,
    DDPStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.checkpoint.conversion.consolidating import Consolidation, consolidate
from tests.optim import blockwise_optimizers
from tests.optim.blockwise_optimizers import FEWEST, OPTIMIZERS, Blocked
from tests.strategies.parity import ignoring
from tests.strategies.stacks import WIDTH, Stack, fit, trainer_of

pytestmark = ignoring(r".*microbatches are fewer")

ONE_DEVICE = "one device"
ON_RANKS: dict[str, Any] = {
    "one rank": (1, DDPStrategy, {}),
    "zero1": (2, ZeRO1Strategy, {}),
    "zero2": (4, ZeRO2Strategy, {}),
    "zero3": (4, ZeRO3Strategy, {}),
    "pipeline": (2, PipelineParallelStrategy, {"num_microbatches": 1}),
    "local_sgd": (2, LocalSGDStrategy, {"sync_every": 1}),
    "two copies": (4, HybridParallelStrategy, {"zero_stage": 2, "data_parallel_size": (2, 2)}),
}


def style(kind: str, base: type[Stack] = Stack) -> type[Stack]:
    """Return a stack whose optimizer is of a kind; each rank takes the same samples."""

    class WithBlocks(base):  # type: ignore[valid-type,misc]
        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[kind](self.parameters(), lr=0.05)

    return WithBlocks


def strategy_of(scheme: str, **options: Any) -> Any:
    if scheme == ONE_DEVICE:
        return "auto"
    num_ranks, make, others = ON_RANKS[scheme]
    return make(backend="in_process", num_ranks=num_ranks, **others, **options)


def resumed(kind: str, scheme: str, path: Path) -> dict[str, Tensor]:
    """Return the weights after the second of two epochs."""
    model = style(kind)()
    trainer_of(strategy_of(scheme)).fit(model, ckpt_path=path, weights_only=False)
    return dict(model.state_dict())


def parts_of(nested: Any) -> list[Tensor]:
    """Return all plain tensors of a state, in order."""
    if isinstance(nested, dict):
        return [part for key in sorted(nested, key=str) for part in parts_of(nested[key])]
    if hasattr(nested, "__tensor_flatten__"):
        names, _ = nested.__tensor_flatten__()
        return [getattr(nested, name) for name in names]
    return [torch.as_tensor(nested)] if isinstance(nested, (int, float, Tensor)) else []


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ON_RANKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_blocks_train_as_on_one_device(kind: str, scheme: str) -> None:
    """One tensor made of several was refused, for an error of the trial that compared states."""
    expected, got = fit(style(kind)), fit(style(kind), strategy_of(scheme))
    torch.testing.assert_close(got.curve.losses, expected.curve.losses, rtol=0, atol=0)
    torch.testing.assert_close(got.weights, expected.weights, rtol=0, atol=0)


class Own(Blocked):
    """One with a setting that its constructor takes, which is none of its defaults."""

    def __init__(self, params: Any, lr: float = 0.01, fewest: int = FEWEST) -> None:
        super().__init__(params, lr)
        self.fewest = fewest

    def is_small(self, param: Tensor) -> bool:
        return param.numel() < self.fewest


class WithOwn(Stack):
    def configure_optimizers(self) -> Any:
        return Own(self.parameters(), lr=0.05, fewest=FEWEST + 1)


def test_settings_that_are_no_defaults_hold_on_ranks() -> None:
    """What began the states had those of the constructor: a block size of torchao's, say."""
    expected, got = fit(WithOwn), fit(WithOwn, strategy_of("zero2"))
    torch.testing.assert_close(got.weights, expected.weights, rtol=0, atol=0)


# Lightning's own strategies cannot load a file with a tensor made of several; one rank can.
class Saves(Callback):
    """Saves when the fit is done, but not over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


class StateBytes(Callback):
    """Notes the bytes of each rank's optimizer state, by what it is of."""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        own = sum(part.nbytes for part in parts_of(dict(optimizer.state)))
        self.of_ranks = trainer.strategy.collectives.all_gather_object(own)


class Wide(Stack):
    """Has most of its elements in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, 8192, bias=False), nn.Linear(8192, 3))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_share_out_the_blocks_of_one_matrix(kind: str, scheme: str) -> None:
    """A parameter whose state lies in blocks lay full, with all of its state, on one rank."""
    held = StateBytes()
    fit(style(kind, Wide), strategy_of(scheme), [held], max_steps=1)
    assert max(held.of_ranks) < 1.5 * sum(held.of_ranks) / len(held.of_ranks)


PAIRS = [("zero2", "one rank"), (ONE_DEVICE, "zero3"), ("zero3", "zero1"), ("pipeline", "zero2")]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_blocks_go_on_where_others_have_saved_them(
    kind: str, first: str, second: str, layout: str, tmp_path: Path
) -> None:
    """At the end of a fit, saving raised what one tensor made of several raises when it is cut."""
    options = {} if first == ONE_DEVICE else {"checkpoint_format": layout}
    saves = Saves(tmp_path / "saved.ckpt")
    fit(style(kind), strategy_of(first, **options), [saves], max_epochs=1)
    got = resumed(kind, second, tmp_path / "saved.ckpt")
    torch.testing.assert_close(got, fit(style(kind)).weights, rtol=0, atol=0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["full", "sharded"])
@pytest.mark.parametrize("scheme", ON_RANKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_file_has_the_codes_of_one_device(
    kind: str, scheme: str, layout: str, tmp_path: Path
) -> None:
    alone, saved, one_file = (tmp_path / name for name in ("alone.ckpt", "saved", "full.ckpt"))
    fit(style(kind), callbacks=[Saves(alone)], max_epochs=1)
    fit(style(kind), strategy_of(scheme, checkpoint_format=layout), [Saves(saved)], max_epochs=1)
    if layout == "sharded":
        consolidate(saved, one_file, Consolidation(trust=True))
    expected, got = (
        parts_of(dict(enumerate(torch.load(path, weights_only=False)["optimizer_states"])))
        for path in (alone, one_file if layout == "sharded" else saved)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_a_state_of_other_blocks_is_refused(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saves(tmp_path / "saved")
    fit(style("entries"), strategy_of("zero2", checkpoint_format=layout), [saved], max_epochs=1)
    monkeypatch.setattr(blockwise_optimizers, "BLOCK", 32)
    with pytest.raises(CheckpointError, match=r"'scale' in a state .* has 4 elements .* of 64"):
        resumed("entries", "zero2", saved.path)
