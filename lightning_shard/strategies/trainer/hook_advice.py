"""Wraps the user's hooks: in one, parameters look full, and errors on shards are explained."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from threading import Lock, get_ident
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Callback, LambdaCallback
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, MultiplicativeLR, SequentialLR

from lightning_shard.errors import ConfigError, ShardError

_HOOKS = sorted(
    {name for name in (*dir(pl.LightningModule), *dir(Callback)) if name.startswith("on_")}
    | {"configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"}
    | {"transfer_batch_to_device", "train_dataloader", "val_dataloader"}
)

_ended: WeakKeyDictionary[Callable[..., Any], Any] = WeakKeyDictionary()  # what each had wrapped
_removing = Lock()

_MEETING_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
)
_BETWEEN_STEPS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "optimizer_step",
    "lr_scheduler_step",
)
_BEFORE_BACKWARD = ("on_before_backward", "on_before_zero_grad", "optimizer_zero_grad")
_OF_FUNCTIONS = LambdaLR, MultiplicativeLR, ChainedScheduler, SequentialLR
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_shard")


class OnlyLooks:
    """A callback that writes to no gradient, though it has a hook in which it could.

    Without this class among its bases, ranks compare at every update what such a callback may have
    done, which takes a message.
    """


def may_edit_gradients(module: "pl.LightningModule", callbacks: Sequence[Callback]) -> bool:
    """Whether user code overrides a hook that could write to gradients before an update."""
    if not module.automatic_optimization:
        return True
    editing = [one for one in callbacks if not isinstance(one, OnlyLooks)]
    return _overrides(_MEETING_GRADIENTS, module, editing)


def may_edit_before_backward(module: "pl.LightningModule", callbacks: Sequence[Callback]) -> bool:
    """Whether user code overrides a hook between a training step and its backward."""
    return _overrides(_BEFORE_BACKWARD, module, callbacks)


def usual_clipping(module: "pl.LightningModule") -> tuple[float | None, float | None]:
    """Return the limit by which Lightning clips each step, and p of the norm or None for values."""
    trainer, overridden = module.trainer, ("configure_gradient_clipping",)
    if not module.automatic_optimization or _overrides(overridden, module, ()):
        return None, None
    by_value = trainer.gradient_clip_algorithm == "value"
    return trainer.gradient_clip_val or None, None if by_value else 2.0


def may_set_weights(module: "pl.LightningModule", callbacks: Sequence[Callback]) -> bool:
    """Whether user code overrides a hook between two steps; Lightning's own set no weights."""
    return _overrides(_BETWEEN_STEPS, module, _of_users(callbacks))


def may_change_groups(module: "pl.LightningModule", callbacks: Sequence[Callback]) -> bool:
    """Whether a hook may give optimizers other groups before their saved state comes back."""
    tuning = [one for one in callbacks if isinstance(one, BaseFinetuning)]
    return _overrides(("on_fit_start",), module, [*tuning, *_of_users(callbacks)])


def _of_users(callbacks: Sequence[Callback]) -> list[Callback]:
    return [
        one
        for one in callbacks
        if type(one).__module__.split(".")[0] not in _PACKAGES or isinstance(one, LambdaCallback)
    ]


def _overrides(
    names: Sequence[str], module: "pl.LightningModule", callbacks: Sequence[Callback]
) -> bool:
    owners = [(module, pl.LightningModule), *((one, Callback) for one in callbacks)]
    return any(
        hasattr(parent, name) and is_overridden(name, owner, parent)
        for owner, parent in owners
        for name in names
    )


def may_see_checkpoints(module: "pl.LightningModule", callbacks: Sequence[Callback]) -> bool:
    """Whether user code has a hook that is given a checkpoint before it is saved."""
    return _overrides(("on_save_checkpoint",), module, callbacks)


def may_see_loaded(module: "pl.LightningModule", callbacks: Sequence[Callback]) -> bool:
    """Whether user code has a hook that is given a checkpoint that is loaded."""
    return type(module).on_load_checkpoint is not CheckpointHooks.on_load_checkpoint or any(
        type(one).on_load_checkpoint is not Callback.on_load_checkpoint for one in callbacks
    )


@contextmanager
def explaining_weights_elsewhere(rank: int) -> Iterator[None]:
    """Explain errors of hooks of saving where weights are on rank 0 alone, or not there yet."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, ShardError) or "meta tensor" not in str(error):
            raise
        if rank == 0:
            raise ConfigError(
                f"Rank 0: code that is called while a checkpoint is saved asks for elements of a "
                f"weight ({error}), but weights come to rank 0 as their file is written, and are "
                f"tensors without elements until then. Work with them in on_save_checkpoint, or "
                f"with the parameters themselves."
            ) from error
        raise ConfigError(
            f"Rank {rank}: on_save_checkpoint asks for elements of a weight ({error}), but the "
            f"weights of a checkpoint come together on rank 0, and are tensors without elements "
            f"here. Work with them where self.trainer.is_global_zero, and take what is to be there "
            f"on all ranks from the parameters themselves."
        ) from error


@contextmanager
def hooks_inside(
    around: Callable[[], AbstractContextManager[None]],
    module: "pl.LightningModule",
    callbacks: Sequence[Callback],
    without: Collection[str] = (),
    only: Collection[str] = _HOOKS,
    also: Collection[str] = (),
) -> Iterator[None]:
    """Let each overridden hook of a module and of callbacks run in a context of its own.

    `also` names hooks of the module that call user code though they are not overridden.
    """
    with ExitStack() as stack:
        for owner, parent in [
            (module, pl.LightningModule),
            *((one, Callback) for one in callbacks),
        ]:
            for name in (one for one in only if one not in without):
                if callable(getattr(parent, name, None)) and (
                    (name in also and owner is module) or is_overridden(name, owner, parent)
                ):
                    stack.enter_context(_inside(around, owner, name))
        yield


def calls_user_code(scheduler: Any) -> bool:
    """Whether a scheduler is the user's own, or may have functions of the user's."""
    is_own = type(scheduler).__module__ != LambdaLR.__module__
    return is_own or isinstance(scheduler, _OF_FUNCTIONS)


@contextmanager
def _inside(
    around: Callable[[], AbstractContextManager[None]], owner: object, name: str
) -> Iterator[None]:
    """Wrap a hook for the calls of this thread."""
    # An object that ranks of one process share is wrapped by each of them, and they may end in any
    # order: what has ended lets calls through until what lies above it has ended as well.
    hook, thread, before = getattr(owner, name), get_ident(), vars(owner).get(name)

    @wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        if called in _ended or get_ident() != thread:
            return hook(*args, **kwargs)
        with around():
            return hook(*args, **kwargs)

    setattr(owner, name, called)
    try:
        yield
    finally:
        _ended[called] = before
        _remove_ended(owner, name)


def _remove_ended(owner: object, name: str) -> None:
    with _removing:
        while isinstance(present := vars(owner).get(name), FunctionType) and present in _ended:
            before = _ended[present]
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
