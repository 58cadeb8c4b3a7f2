"""Lets Lightning's finetuning callbacks compare an optimizer's parameters by identity.

`BaseFinetuning` compares values with `torch.equal`. Between the steps of ZeRO stage 3 each rank has
shards of the parameters, and empty shards are all equal: every rank would leave others out of the
group that is added, and the ranks' optimizers would no longer fit together.
"""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch.optim import Optimizer


def compare_by_identity(callbacks: Iterable[Callback]) -> None:
    """Let the finetuning callbacks among these add parameters by identity.

    The change stays after the run: its result is the same wherever no two parameters are equal.
    """
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            callback.unfreeze_and_add_param_group = _unfreeze_and_add  # type: ignore[method-assign]


def _unfreeze_and_add(
    modules: Any,
    optimizer: Optimizer,
    lr: float | None = None,
    initial_denom_lr: float = 10.0,
    train_bn: bool = True,
) -> None:
    """Unfreeze modules and add a group, as `unfreeze_and_add_param_group`, but by identity."""
    BaseFinetuning.make_trainable(modules)
    known = {param for group in optimizer.param_groups for param in group["params"]}
    trainable = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
    params = [param for param in trainable if param not in known]
    rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
    if params:
        optimizer.add_param_group({"params": params, "lr": rate})
