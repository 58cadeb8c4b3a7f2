"""Asynchronous SGD as a Lightning strategy: gradients are applied as they arrive, within a bound.

    between the steps           each rank serves its shard; it waits where it is too far ahead
    validation, checkpoints,    all ranks agree: every gradient is applied, and they hold the same
    the end of an epoch

A rank clips by the norm of its own gradient, and each owner applies what has come by the learning
rate and the options that its own scheduler has set. With a bound of 0 it is "zero1": the same
owners, who average the gradients of one step and apply them once; so are the steps of a warm-up.

Source of the warm-up: warm starts of Downpour SGD, Dean et al., NeurIPS 2012.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.async_sgd.async_sgd import (
    AsyncCounters,
    AsyncSGD,
    check_learning_rates,
)
from lightning_shard.data_parallel.async_sgd.engine import AsyncEngine
from lightning_shard.data_parallel.async_sgd.mailbox import mailbox_type
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import DTypePolicy
from lightning_shard.errors import ConfigError
from lightning_shard.precision.plugins import ShardedMixedPrecision
from lightning_shard.strategies.local_updates import LocalUpdates
from lightning_shard.strategies.options import AsyncSGDOptions, SharedOptions
from lightning_shard.strategies.trainer._lightning import layer_sync


class AsyncSGDStrategy(LocalUpdates):
    """Each rank owns a shard and applies gradients as they arrive. `strategy="async_sgd"`.

    Raises:
        ConfigError: Options that cannot be.
    """

    stage = 1
    owns_matrices = False
    engine_type: ClassVar[type[DataParallelEngine]] = AsyncEngine

    @takes(AsyncSGDOptions)
    def __init__(self, options: AsyncSGDOptions) -> None:
        super().__init__(**options.part(SharedOptions))
        self._bound, self._rule = options.staleness_bound, options.staleness_lr
        self._warmup_steps = options.warmup_steps
        self._mail: Collectives | None = None  # over a group for messages alone
        self._async: AsyncSGD | None = None  # while ranks train by themselves
        self._counters = AsyncCounters()

    @property
    def counters(self) -> AsyncCounters:
        """Counters of this rank in this fit, or in the last one."""
        return self._counters

    @property
    def message_traffic(self) -> Traffic:
        """Counters of the messages that this rank has sent while training by itself."""
        return Traffic() if self._mail is None else self._mail.traffic

    @override
    def _make_groups(self) -> None:
        super()._make_groups()
        if self._bound == 0:
            return
        backend = self.backend.with_debug(False)
        if backend.name == "nccl":
            backend = get_backend("gloo")  # messages lie in host memory
        group = dist.new_group(backend=backend.c10d_name, timeout=self._local_ranks.timeout)
        self._mail = backend.collectives(group)
        self._mailbox_type = mailbox_type(backend.name)

    @override
    def forget_groups(self) -> None:
        self._mail = None
        super().forget_groups()

    @override
    def _dtypes(self, precision: str) -> DTypePolicy:
        if self._bound > 0 and precision == "bf16-mixed":
            precision = "32-true"  # autocast narrows what needs to be; there is no second copy
        return super()._dtypes(precision)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._bound > 0:
            self._check_run(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._bound > 0:
            check_learning_rates(self.optimizers[0])  # now, not when the warm-up ends

    def _check_run(self, trainer: "pl.Trainer") -> None:
        if not self.run_module.automatic_optimization:
            raise ConfigError(
                f"{type(self.run_module).__name__} optimizes by hand, but asynchronous SGD "
                f"sends each gradient when the Trainer takes a step; expected automatic "
                f"optimization. Use it, or strategy='local_sgd', or staleness_bound=0."
            )
        plugin = self.precision_plugin
        if isinstance(plugin, ShardedMixedPrecision) and plugin.scaler is not None:
            raise ConfigError(
                "precision='16-mixed' lets all ranks skip a step in which one overflows, but under "
                "asynchronous SGD ranks are at different steps; expected another precision. Use "
                "'bf16-mixed' or '32-true'."
            )
        if layer_sync(self) is not None:
            raise ConfigError(
                "sync_batchnorm=True makes ranks wait for each other in every forward, but under "
                "asynchronous SGD they are at different steps; expected it to be off. When ranks "
                "agree, they take over rank 0's statistics."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                raise ConfigError(
                    f"{type(callback).__name__} would average what each rank holds after its own "
                    f"steps, which differs under asynchronous SGD; expected no averaging callback. "
                    f"Use strategy='zero1' with it."
                )

    @override
    def begin_step(self) -> None:
        try:
            super().begin_step()
        except BaseException:
            if self._lifeline is not None and self._lifeline.stops:
                self._agree()  # all ranks stop before the same step, and callbacks may save there
            raise

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._counters = AsyncCounters()
        self._part_if_time(self.run_module.trainer.global_step)

    def _part_if_time(self, num_steps: int) -> None:
        """Once the warm-up is over, leave the ranks to themselves."""
        if self._async is not None or self._bound == 0 or num_steps < self._warmup_steps:
            return
        assert self._mail is not None
        assert isinstance(self.engine, AsyncEngine)
        self._async = AsyncSGD(
            self.engine,
            self.optimizers[0],
            self._mail,
            self._mailbox_type,
            self._bound,
            self._rule,
        )
        self._counters = self._async.counters

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._async is not None:
            self._async.before_step()
        result = super().optimizer_step(*args, **kwargs)
        if self._async is not None:
            self._async.after_step()
        return result

    @override
    def _end_step(self) -> None:
        trainer = self.run_module.trainer
        if self._async is None:
            self._part_if_time(trainer.global_step)
            return
        self._async.count_step()
        is_last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_last_batch or trainer.global_step == trainer.max_steps:
            self._async.agree()

    def _agree(self) -> None:
        if self._async is not None:
            self._async.agree()

    @override
    def _consensus(self) -> AbstractContextManager[None]:
        self._agree()
        return nullcontext()

    @override
    def _end_epoch(self) -> None:
        self._agree()

    @override
    def _end_training(self) -> None:
        if self._async is not None:
            self._async.finish()
            self._async = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agree()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._agree()
        return super().optimizer_state(optimizer)

    @override
    def teardown(self) -> None:
        if self._async is not None:
            self._async.abandon()
            self._async = None
        super().teardown()
