"""Checkpoints that fit: every optimizer's state, and what a module's own loading leaves alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import nn

from lightning_shard.checkpoint.misfits import optimizer_misfits
from tests.checkpoint.test_misfits import (
    STRATEGIES,
    Counted,
    assert_same,
    fresh,
    pytestmark,
    resume,
    trainer_of,
)

__all__ = ["pytestmark"]

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-3),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=1e-2),
    "sgd without state": lambda params: torch.optim.SGD(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=True),
    "asgd": lambda params: torch.optim.ASGD(params),
    "rprop": lambda params: torch.optim.Rprop(params),
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_every_optimizer_loads(kind: str, tmp_path: Path) -> None:
    class Optimized(Counted):
        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[kind](self.parameters())

    trainer = trainer_of("auto")
    trainer.fit(fresh(Optimized)[0])
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    resume("shard_ddp", tmp_path / "own.ckpt", fresh(Optimized)[0], max_steps=3)


class Extending(Counted):
    """Takes the first rows of the head from what was saved, and leaves the embedding out."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        rows = state["head.weight"]
        kept = {name: value for name, value in state.items() if not name.startswith("embed.")}
        kept.pop("head.weight")
        result = super().load_state_dict(kept, strict=False)
        self.head.weight.data[: len(rows)].copy_(rows)
        result.missing_keys.clear()
        return result


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_what_hooks_leave_alone_keeps_its_value(strategy: str) -> None:
    """Loaded in the middle of a run, when parameters are in shards."""
    model, before = fresh(Extending)
    ones = {name: torch.ones_like(value) for name, value in before.items()}
    ones["head.weight"] = ones["head.weight"][:2]

    class Loads(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.strategy.load_model_state_dict({"state_dict": ones})
            self.got = trainer.strategy.lightning_module_state_dict()

    trainer_of(STRATEGIES[strategy](), callbacks=[loads := Loads()]).fit(model)
    expected = {name: torch.ones_like(value) for name, value in before.items()}
    expected["head.weight"][2] = before["head.weight"][2]
    expected |= {name: before[name] for name in before if name.startswith("embed.")}
    assert_same(dict(loads.got), expected)


def test_the_state_of_a_complex_parameter_beside_real_ones_fits() -> None:
    """The state of a complex parameter beside real ones did not fit."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    optimizer = torch.optim.AdamW(params, amsgrad=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    shapes = {param: (f"p{number}", param.shape) for number, param in enumerate(params)}
    saved = optimizer.state_dict()
    assert optimizer_misfits(saved, optimizer, shapes) == []
    saved["state"][1] = saved["state"][0]
    (found, *_) = optimizer_misfits(saved, optimizer, shapes)
    assert "'exp_avg' of 'p1' in the state of AdamW is of torch.float32, expected complex" in found
