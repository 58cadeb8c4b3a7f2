"""`strategy="shard_auto"`: plan when a fit begins, then be what has been chosen.

    Trainer      setup_environment      setup                                    the fit
    AutoStrategy  the ranks meet   ──>  rank 0 plans, all become its choice ──>  ZeRO2Strategy, say

Until `setup` a strategy has only what every one of them has: the ranks' places and their group. So
it can still become any: its class and what options decide are exchanged, and what Lightning and the
run have given it stays. From there on it is the chosen strategy, not something around it: what
trains, saves and is asked for its name is exactly what `Trainer(strategy=...)` makes of the choice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_shard.backends.free_memory import free_bytes
from lightning_shard.core.options import names_of, takes
from lightning_shard.core.reporting.records import PLAN
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import batch_size_of
from lightning_shard.planning.candidates import strategy_class
from lightning_shard.planning.machine import MachineProfile, machine_profile, published
from lightning_shard.planning.plan import Plan
from lightning_shard.planning.search import plan
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.options import (
    AutoOptions,
    DataParallelOptions,
    FitEndOptions,
    LightningOptions,
    RunOptions,
)
from lightning_shard.strategies.parts import SchemeHooks
from lightning_shard.strategies.trainer.measured_stages import first_batch

_USABLE = 0.9  # of the free memory: kernels' workspace, fragments and NCCL's buffers take the rest
_ADVICE = (
    "Name a strategy, such as 'zero2'; `lightning-shard plan` compares them, and `lightning-shard "
    "prove` says whether the module trains right under it."
)
DECIDED = ("axis_order", "data_parallel_size", "dimensions", "given_options", "stage")
"""The attributes of a strategy that its class and options decide, beside those of its own."""


class AutoHooks(SchemeHooks):
    """Leaves the groups of a fit to the strategy that is chosen."""

    @override
    def chooses_groups(self) -> bool:
        return bool(self.run.is_fitting())


class AutoStrategy(DataParallelStrategy):
    """Plans when a fit begins, and becomes what it has chosen; `strategy="shard_auto"`.

    The samples of a step are those that `shard_ddp` would train with on as many devices: where
    ranks share a model, more batches are accumulated. A run that trains nothing has a full model on
    each rank.

    Raises:
        ConfigError: At the beginning of a fit, nothing fits, or the module cannot be planned for.
    """

    stage = 0

    @takes(AutoOptions)
    def __init__(self, options: AutoOptions) -> None:
        self._auto = options
        super().__init__(**options.part(DataParallelOptions))
        self.run.hooks = AutoHooks(self.run)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if not self.run.is_fitting():
            super().setup(trainer)
            return
        self._choose(trainer)
        self.run.groups.forget()  # which are of a strategy that had chosen nothing
        self.run.groups.use()
        self.setup(trainer)  # the chosen strategy's

    def _choose(self, trainer: "pl.Trainer") -> None:
        """Become what rank 0 chooses; each rank must call."""
        memory = self._memory_of_device()
        folder = trainer.log_dir or trainer.default_root_dir
        found = self.broadcast(self._found(trainer, memory) if self.mesh_rank == 0 else "")
        if isinstance(found, str):
            raise ConfigError(found)
        assert found.recommendation is not None
        made, given = found.recommendation.candidate, self._given(RunOptions, FitEndOptions)
        if self._auto.choice_file is not None and self.mesh_rank == 0:
            path = Path(folder, self._auto.choice_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found.to_yaml(**_plain(given)), encoding="utf-8")
            path.with_name(PLAN).write_text(found.to_json(), encoding="utf-8")
            rank_zero_info(f"shard_auto: {path} fixes this choice, as a config of `fit`.")
        trainer.accumulate_grad_batches = made.accumulated
        options = made.options(self._auto.tensor_plan)
        become(self, strategy_class(made.class_name)(**given, **options))
        self.prediction = found.to_dict()

    def _given(self, *groups: Any) -> dict[str, Any]:
        """Return what this was made with of these groups, but for what Lightning sets."""
        _, given = self.given_options  # type: ignore[attr-defined]
        names = {name for group in groups for name in names_of(group)}
        of_lightning = names_of(LightningOptions)
        return {name: given[name] for name in names.difference(of_lightning) if name in given}

    def _memory_of_device(self) -> int | None:
        """Return the bytes that each rank may take, the least of all; each rank must call."""
        if self._auto.device_memory is not None:
            return self._auto.device_memory
        free = free_bytes(self.root_device)
        if free is not None and self.root_device.type == "cpu":
            free //= self.num_processes
        known = [one for one in self.collectives.all_gather_object(free) if one is not None]
        return int(min(known) * _USABLE) if known else None

    def _found(self, trainer: "pl.Trainer", memory: int | None) -> Plan | str:
        """Return the plan whose recommendation all ranks have to become, or why there is none."""
        try:
            found = self._planned(trainer, memory)
        except Exception as error:  # of the user's step, on tensors without elements
            return (
                f"strategy='shard_auto' could not plan for {type(error).__name__}: {error} "
                f"{_ADVICE}"
            )
        if found.recommendation is None:
            return f"strategy='shard_auto' found nothing that fits. {found.reason}"
        if self.run.announces:
            rank_zero_info(f"shard_auto chooses:\n{found}")
        return found

    def _planned(self, trainer: "pl.Trainer", memory: int | None) -> Plan:
        module = self.lightning_module
        assert module is not None
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(one, GradientAccumulationScheduler) for one in callbacks):
            raise ConfigError(
                "GradientAccumulationScheduler changes how many batches make a step, which the "
                "plan has to choose."
            )
        batch = first_batch(trainer)
        size = batch_size_of(batch)
        return plan(
            module,
            batch,
            devices=self.mesh_size,
            nodes=self.num_nodes,
            device_memory=memory,
            global_batch=size * self.mesh_size * trainer.accumulate_grad_batches,
            batch_size=size,
            machine=self._machine(),
            precision=str(self.precision_plugin.precision),
            tensor_plan=self._auto.tensor_plan,
        )

    def _machine(self) -> MachineProfile:
        if self._auto.machine != "auto":
            return machine_profile(self._auto.machine)
        if self.root_device.type == "cpu":
            return machine_profile("cpu")
        device = torch.cuda.get_device_name(self.root_device)
        name = next((one for one in published() if one.upper() in device.upper()), None)
        if name is None:
            rank_zero_warn(
                f"shard_auto knows no machine profile of {device!r} and compares times with those "
                f"of an H100. `lightning-shard doctor --measure here.json` writes one, for "
                f"AutoStrategy(machine='here.json')."
            )
        return machine_profile(name or "h100")


def become(strategy: Any, chosen: Any) -> None:
    """Let one strategy be another, keeping what the Trainer and the run have given it."""
    kept = vars(strategy)
    kept |= {one: value for one, value in vars(chosen).items() if one in DECIDED or one not in kept}
    strategy.run.become(chosen.run)
    strategy.__class__ = type(chosen)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a strategy's options that YAML has."""
    kinds = (bool, int, float, str)
    return {name: one for name, one in options.items() if isinstance(one, kinds)}
