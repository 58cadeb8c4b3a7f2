"""Each hook of modules and callbacks comes as often as on one device, and in the same order."""

from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring(".*ckpt_path")
BESIDE = {"on_gpu", "optimizers", "configure_callbacks", "configure_sharded_model"}
BEGINNINGS = ("on_", "configure_", "optimizer_", "lr_scheduler_step", "transfer_", "prepare_data")
OTHERS = {
    "setup", "teardown", "training_step", "validation_step", "test_step", "predict_step",
    "backward", "train_dataloader", "val_dataloader", "state_dict", "load_state_dict",
}  # fmt: skip


def noting(base: Any, names: Any) -> Any:
    """Return a class whose methods note their names in a list that its owner is given."""

    def noted(name: str) -> Any:
        own = getattr(base, name)

        @wraps(own)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (calls := vars(self).get("calls")) is not None:
                calls.append(f"{base.__name__}.{name}")
            return own(self, *args, **kwargs)

        return method

    return type(f"Noting{base.__name__}", (base,), {name: noted(name) for name in names})


def hooks_of(base: Any) -> list[str]:
    names = [one for one in dir(base) if one in OTHERS or one.startswith(BEGINNINGS)]
    return [one for one in names if one not in BESIDE and callable(getattr(base, one))]


Module = noting(BoringModel, set(hooks_of(LightningModule)) - {"state_dict", "load_state_dict"})
Looking = noting(Callback, hooks_of(Callback))


def run(strategy: str, ranks: int, folder: Path) -> list[str]:
    calls: list[str] = []  # of rank 0; other ranks have copies

    def made(epochs: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module, callback = Module(), Looking()
        module.calls = callback.calls = calls
        trainer = quiet_trainer(
            strategy=strategy, devices=ranks, max_epochs=epochs, max_steps=-1, callbacks=[callback],
            limit_train_batches=3, limit_val_batches=1, limit_test_batches=1,
            limit_predict_batches=1, accumulate_grad_batches=2, num_sanity_val_steps=1,
            use_distributed_sampler=False,
        )  # fmt: skip
        return trainer, module

    trainer, module = made(1)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "one.ckpt")
    for what in (trainer.validate, trainer.test):
        what(module, verbose=False)
    trainer.predict(module)
    trainer, module = made(2)
    trainer.fit(module, ckpt_path=folder / "one.ckpt")
    return calls


@cache
def of_one_device(folder: Path) -> list[str]:
    return run("auto", 1, folder)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero2", "zero3"])
def test_hooks_come_in_the_order_of_one_device(
    scheme: str, ranks: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = of_one_device(tmp_path_factory.getbasetemp())
    assert len(set(expected)) > 60
    assert run(f"{scheme}_in_process", ranks, tmp_path) == expected
