"""Saving and loading full checkpoints, brought together from the ranks' shards."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.full import full_module_state, load_module_state
from lightning_shard.checkpoint.optimizer_state import full_state_dict, local_state_dict
from lightning_shard.checkpoint.resuming import Resuming, agree_on_misfit, error_of, run_misfits
from lightning_shard.checkpoint.section import section_of, writable_section
from lightning_shard.checkpoint.user_shards import join_shards
from lightning_shard.data_parallel.compression.state import full_state, load_full_state
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.strategies.salvage import SalvagingStrategy


class CheckpointingStrategy(SalvagingStrategy):
    """Saves and loads full checkpoints, during a run from the engine's shards."""

    _options: EngineOptions
    _compression_state: dict[str, Any]  # of the last fit, on rank 0
    _left_sharded: bool  # by a failed run: there is nothing whole to save
    _resuming: Resuming | None  # until everything is known to fit

    @property
    def engine(self) -> DataParallelEngine:
        """The engine; there from `setup` to `teardown`."""
        if self._engine is None:
            raise ConfigError("There is no engine before the strategy's setup or after teardown.")
        return self._engine

    @property
    def _holds_shards(self) -> bool:
        """Whether this rank's state is less than a single device's."""
        return self._options.stage > 0

    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    def _state_of_compression(self) -> dict[str, Any]:
        """Return compression's state on rank 0; each rank must call."""
        compressor = self._options.compression
        if self._engine is None or compressor is None:
            return self._compression_state
        keep = self._engine.is_first
        return full_state(compressor, self._engine.exchanges, keep=keep)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self._options.compression is not None and "optimizer_states" in checkpoint:
            state = self._state_of_compression()
            writable_section(checkpoint)["compression"] = state
        if self._engine is not None and self._options.stage == 3:
            join_shards(checkpoint, self._engine)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if self._engine is None:  # after teardown everything is full again
            self._check_full()
            return self.lightning_module.state_dict()
        return full_module_state(self.lightning_module, self._engine)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._is_fitting():
            section_of(checkpoint)  # raises for a newer format, before anything is loaded
        averages = self._is_fitting() and self._engine is None
        before = load_module_state(
            self.lightning_module,
            checkpoint["state_dict"],
            strict=strict,
            engine=self._engine,
            agree=partial(agree_on_misfit, self._collectives if dist.is_initialized() else None),
            paired=checkpoint.get("current_model_state") if averages else None,  # WeightAveraging's
        )
        if self._engine is None and "optimizer_states" in checkpoint and self._is_fitting():
            self._resuming = Resuming(checkpoint, before)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._engine is None:
            self._check_full()
            return raw.state_dict() if self.is_global_zero else {}
        return full_state_dict(raw, self._engine)

    def _check_full(self) -> None:
        if self._left_sharded:
            raise CheckpointError(
                f"Rank {self.global_rank}: the last run failed and left shards of its state on the "
                f"ranks, expected full tensors to save. Resume from an earlier checkpoint."
            )

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self._resuming is None:
            agree_on_misfit(self._collectives, error_of(self._misfits(checkpoint)))
        self._resuming = None
        kept = section_of(checkpoint).get("compression", {})
        if self._options.compression is not None:
            load_full_state(self._options.compression, self.engine.exchanges, kept)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            local = local_state_dict(state, optimizer, self.engine)
            with self.engine.optimizer_view():
                optimizer.load_state_dict(local)

    def _misfits(self, checkpoint: Mapping[str, Any]) -> list[str]:
        assert self.lightning_module is not None
        return run_misfits(
            checkpoint,
            self.lightning_module,
            self.optimizers,
            kept=section_of(checkpoint),
            scaler=getattr(self.precision_plugin, "scaler", None),
            scaler_state=checkpoint.get(MixedPrecision.__qualname__),
            engine=self._engine,
        )

    @property
    @override
    def _has_all(self) -> bool:
        if self._engine is None:
            return not self._left_sharded
        is_split = not isinstance(self._engine.split, Unsplit)
        return not (self._holds_shards or is_split or self._options.compression is not None)
