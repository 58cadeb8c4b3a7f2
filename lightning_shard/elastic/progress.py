"""Progress of training: the state at a boundary beside parameters and optimizer state.

    common   loops, callbacks, schedulers, data module, position in the data, module buffers, what
             trains: alike on every rank, so any one's will do
    own      random streams, what was logged in this epoch, what hooks and steps have set in
             attributes: each rank's

Which parameters train, hooks may change in mid-run: flat buffers are laid out as the engine was
built, where they part frozen parameters from others, and what trains at the boundary is set then.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.elastic import _lightning
from lightning_shard.elastic._lightning import EpochLogs, put_logs, take_logs
from lightning_shard.elastic.data_assignment import BatchAssignment
from lightning_shard.elastic.hook_values import HeldValues
from lightning_shard.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state at a boundary beside parameters and optimizer state.

    Attributes:
        trainer: See `_lightning.trainer_state`; pickled, since it refers to what goes on changing.
        behind_step: Whether it is the boundary behind an optimizer step, not that before the first.
        restarting: At the boundary before the first step, whether the epoch was taken up from a
            checkpoint.
        hook_values: What has changed in this rank's attributes since training began.
    """

    trainer: bytes
    behind_step: bool
    restarting: bool
    accumulation: int
    batch_assignment: BatchAssignment
    buffers: dict[str, Tensor]
    what_trains: "WhatTrains"
    hook_values: HeldValues
    random: dict[str, Any]
    logs: EpochLogs

    @classmethod
    def of(
        cls,
        trainer: "pl.Trainer",
        batch_assignment: BatchAssignment,
        as_built: dict[str, bool],
        hook_values: HeldValues,
        *,
        behind_step: bool,
    ) -> "Progress":
        """Take down how far a Trainer is, at a boundary; `as_built` is of `WhatTrains`."""
        module = trainer.lightning_module
        return cls(
            trainer=_pickled(_lightning.trainer_state(trainer)),
            behind_step=behind_step,
            restarting=trainer.fit_loop.epoch_loop.restarting,
            accumulation=trainer.accumulate_grad_batches,
            batch_assignment=batch_assignment,
            buffers={name: host_copy(buffer) for name, buffer in module.named_buffers()},
            what_trains=WhatTrains.of(module, trainer.strategy.optimizers, as_built),
            hook_values=hook_values,
            random=_lightning.random_states(include_cuda=torch.cuda.is_available()),
            logs=take_logs(trainer),
        )

    def pack(self) -> bytes:
        """Return it as bytes, or raise ConfigError where something cannot be pickled."""
        return _pickled(vars(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Progress":
        """Return what a rank of this job has packed."""
        return cls(**pickle.loads(packed))

    @torch.no_grad()
    def load_module(self, module: "pl.LightningModule") -> None:
        """Set the module's buffers, and which of its parameters train."""
        set_flags(module, self.what_trains.now)
        for name, buffer in module.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])

    def load_trainer(self, trainer: "pl.Trainer") -> None:
        """Set loops, callbacks, schedulers and the data module."""
        _lightning.load_trainer_state(trainer, pickle.loads(self.trainer))
        if not self.behind_step:
            trainer.fit_loop.epoch_loop.restarting = self.restarting

    def load_own(self, trainer: "pl.Trainer", own: "Progress | None", rank: int) -> None:
        """Set random streams and what was logged, as `own` remembers them of the same boundary.

        A newcomer gets random streams of its own and a share of nothing.
        """
        if own is not None:
            _lightning.set_random_states(own.random)
        else:
            _lightning.set_random_states(self.random)
            torch.manual_seed(torch.initial_seed() + rank)
        put_logs(trainer, (own or self).logs, reduce=trainer.strategy.reduce, emptied=own is None)


def _pickled(state: Any) -> bytes:
    try:
        return pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigError(
            f"Elastic training sends the state of callbacks, schedulers and the data module to "
            f"peers, but something in it cannot be pickled ({type(error).__name__}: {error}). "
            f"Return plain values and tensors from state_dict and on_save_checkpoint."
        ) from error


def flags_of(module: nn.Module) -> dict[str, bool]:
    """Return by name whether each parameter requires a gradient."""
    return {name: param.requires_grad for name, param in module.named_parameters()}


def set_flags(module: nn.Module, flags: dict[str, bool]) -> None:
    """Freeze and thaw parameters, by their names."""
    for name, param in module.named_parameters():
        if flags.get(name, param.requires_grad) != param.requires_grad:
            param.requires_grad_(flags[name])


@dataclass(frozen=True, kw_only=True)
class WhatTrains:
    """What trains at a boundary."""

    as_built: dict[str, bool]
    now: dict[str, bool]
    groups: list[list[list[str]]]

    @classmethod
    def of(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], as_built: dict[str, bool]
    ) -> "WhatTrains":
        """Take down what trains now."""
        names = {param: name for name, param in module.named_parameters()}
        groups = [
            [[names.get(param, "") for param in group["params"]] for group in one.param_groups]
            for one in optimizers
        ]
        return cls(as_built=as_built, now=flags_of(module), groups=groups)

    def go_back(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Have what the engine was made of, before it is made anew, and the groups of then."""
        set_flags(module, self.as_built)
        params = dict(module.named_parameters())
        for optimizer, groups in zip(optimizers, self.groups, strict=False):
            del optimizer.param_groups[len(groups) :]  # added since
            for names in groups[len(optimizer.param_groups) :]:
                mine = [params[name] for name in names if name in params]
                optimizer.add_param_group({"params": mine})
