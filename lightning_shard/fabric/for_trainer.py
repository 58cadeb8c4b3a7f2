"""A state for `fabric.save` from which a Trainer resumes, and into which its checkpoints load.

    state = trainer_checkpoint(model, optimizer, scheduler, global_step=100, batch=100)
    fabric.save("last.ckpt", state)          trainer.fit(module, ckpt_path="last.ckpt")
    fabric.load("trainers.ckpt", state)      state["global_step"], state["epoch"]

The keys are those of Lightning's checkpoints. A loop of the user's counts its steps by itself; what
a Trainer has to know of them, its loops' progress, is made of three numbers. The names in it are
private to Lightning; `tests/fabric/test_for_trainer.py` fails when one changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.sharded.entries import lightning_version
from lightning_shard.fabric.checkpoints import NamedModules


def trainer_checkpoint(
    modules: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] = (),
    schedulers: Any = (),
    *,
    global_step: int = 0,
    epoch: int = 0,
    batch: int = 0,
) -> dict[str, Any]:
    """Return a state with the keys of Lightning's checkpoints.

    Args:
        modules: The model; or by name the parts of a `LightningModule` that is not here.
        optimizers: Its optimizers, in the order of `configure_optimizers`.
        schedulers: Its learning rate schedulers, in that order.
        global_step: Optimizer steps so far, of all optimizers together.
        epoch: Epochs that are complete.
        batch: Batches of this epoch that are done; a Trainer goes on with the next one.

    Returns:
        The state; `fabric.load` fills it in place.
    """
    optimizers = _listed(optimizers)
    state: dict[str, Any] = {
        "epoch": epoch,
        "global_step": global_step,
        "pytorch-lightning_version": lightning_version(),
        "state_dict": NamedModules(modules) if isinstance(modules, Mapping) else modules,
        "loops": {"fit_loop": _fit_loop(global_step, len(optimizers), epoch, batch)},
        "callbacks": {},
        "optimizer_states": optimizers,
        "lr_schedulers": _listed(schedulers),
    }
    hparams = getattr(modules, "hparams", None)
    if hparams:
        state |= {"hparams_name": "kwargs", "hyper_parameters": dict(hparams)}
    return state


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _fit_loop(steps: int, num_optimizers: int, epoch: int, batch: int) -> dict[str, Any]:
    """Return the progress of a Trainer's loops after so many steps, between two batches."""
    done = {"ready": epoch, "completed": epoch, "started": epoch, "processed": epoch}
    begun = {**done, "ready": epoch + 1, "started": epoch + 1} if batch else done
    batches = dict.fromkeys(("ready", "completed", "started", "processed"), batch)
    stepped = {"ready": steps, "completed": steps}
    zeroed = {**stepped, "started": steps}
    manual = num_optimizers > 1  # Lightning steps several by hand alone
    none = {"ready": 0, "completed": 0}
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps // max(num_optimizers, 1)},
        "epoch_loop.batch_progress": {"total": batches, "current": batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": {"total": stepped, "current": stepped},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _twice(none if manual else stepped),
                "zero_grad": _twice({**none, "started": 0} if manual else zeroed),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _twice(stepped if manual else none),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {
            **_twice({**none, "started": 0, "processed": 0}),
            "is_last_batch": False,
        },
        "epoch_progress": _twice(begun),
    }


def _twice(progress: Mapping[str, int]) -> dict[str, Any]:
    return {"total": dict(progress), "current": dict(progress)}
