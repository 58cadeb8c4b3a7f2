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
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.backends.traffic import Traffic
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.async_sgd.async_sgd import (
    AsyncCounters,
    AsyncEngine,
    AsyncSGD,
    check_learning_rates,
)
from lightning_shard.data_parallel.async_sgd.mailbox import mailbox_type
from lightning_shard.errors import ConfigError
from lightning_shard.precision.plugins import ShardedMixedPrecision
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.options import AsyncSGDOptions, SharedOptions
from lightning_shard.strategies.parts import LocalUpdates


class AsyncUpdates(LocalUpdates):
    """Lets each rank own a shard once the warm-up is over, and apply gradients as they arrive.

    Attributes:
        counters: Counters of this rank in this fit, or in the last one.
        mail: All ranks, over a group for messages alone; None before there are groups.
    """

    engine_type = AsyncEngine

    def __init__(self, run: Any, options: AsyncSGDOptions) -> None:
        super().__init__(run)
        self.bound, self._rule = options.staleness_bound, options.staleness_lr
        self._warmup_steps = options.warmup_steps
        self.counters = AsyncCounters()
        self.mail: Collectives | None = None
        self.sgd: AsyncSGD | None = None

    @override
    def make_groups(self) -> None:
        if self.bound == 0:
            return
        backend = self.strategy.backend.with_debug(False)
        if backend.name == "nccl":
            backend = get_backend("gloo")  # messages lie in host memory
        timeout = self.strategy.local_ranks.timeout
        self.mail = backend.collectives(dist.new_group(backend=backend.c10d_name, timeout=timeout))
        self._mailbox_type = mailbox_type(backend.name)

    @override
    def forget_groups(self) -> None:
        self.mail = None

    @override
    def computed_in(self, precision: str) -> str:
        if self.bound > 0 and precision == "bf16-mixed":
            return "32-true"  # autocast narrows what needs to be; there is no second copy
        return precision

    @override
    def begin_run(self, trainer: "pl.Trainer") -> None:
        if self.bound == 0:
            return
        module = self.run.module
        if not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} optimizes by hand, but asynchronous SGD "
                f"sends each gradient when the Trainer takes a step; expected automatic "
                f"optimization. Use it, or strategy='local_sgd', or staleness_bound=0."
            )
        plugin = self.strategy.precision_plugin
        if isinstance(plugin, ShardedMixedPrecision) and plugin.scaler is not None:
            raise ConfigError(
                "precision='16-mixed' lets all ranks skip a step in which one overflows, but under "
                "asynchronous SGD ranks are at different steps; expected another precision. Use "
                "'bf16-mixed' or '32-true'."
            )
        self.refuse(
            trainer,
            "asynchronous SGD they are at different steps; expected it to be off. When ranks "
            "agree, they take over rank 0's statistics.",
            "what each rank holds after its own steps, which differs under asynchronous SGD; "
            "expected no averaging callback. Use strategy='zero1' with it.",
        )

    @override
    def begin_fit(self, trainer: "pl.Trainer") -> None:
        super().begin_fit(trainer)
        if self.bound > 0:
            check_learning_rates(self.strategy.optimizers[0])  # now, not when the warm-up ends

    @override
    def begin_training(self) -> None:
        self.counters = AsyncCounters()
        self._part_if_time(self.run.module.trainer.global_step)

    def _part_if_time(self, num_steps: int) -> None:
        """Once the warm-up is over, leave the ranks to themselves."""
        if self.sgd is not None or self.bound == 0 or num_steps < self._warmup_steps:
            return
        assert self.mail is not None
        engine, optimizer = self.strategy.engine, self.strategy.optimizers[0]
        assert isinstance(engine, AsyncEngine)
        self.sgd = AsyncSGD(
            engine, optimizer, self.mail, self._mailbox_type, self.bound, self._rule
        )
        self.counters = self.sgd.counters

    @override
    def end_step(self) -> None:
        trainer = self.run.module.trainer
        if self.sgd is None:
            self._part_if_time(trainer.global_step)
            return
        self.sgd.count_step()
        is_last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_last_batch or trainer.global_step == trainer.max_steps:
            self.sgd.agree()

    def agree(self) -> None:
        """Let ranks hold the same; each must call after the same number of steps."""
        if self.sgd is not None:
            self.sgd.agree()

    @override
    def in_agreement(self) -> AbstractContextManager[None]:
        self.agree()
        return nullcontext()

    @override
    def end_epoch(self) -> None:
        self.agree()

    @override
    def stop_together(self) -> None:
        self.agree()

    @override
    def end_steps(self) -> None:
        if self.sgd is not None:
            self.sgd.finish()
            self.sgd = None

    @override
    def end_run(self) -> None:
        if self.sgd is not None:
            self.sgd.abandon()
            self.sgd = None
        super().end_run()


class AsyncSGDStrategy(DataParallelStrategy):
    """Each rank owns a shard and applies gradients as they arrive. `strategy="async_sgd"`.

    Raises:
        ConfigError: Options that cannot be.
    """

    stage = 1
    keeps_optimizers = True
    lays_out_anew = False
    meets_at_steps = False
    owns_matrices = cuts_at_blocks = False

    @takes(AsyncSGDOptions)
    def __init__(self, options: AsyncSGDOptions) -> None:
        super().__init__(**options.part(SharedOptions))
        self.run.hooks = self.updates = AsyncUpdates(self.run, options)

    @property
    def counters(self) -> AsyncCounters:
        """Counters of this rank in this fit, or in the last one."""
        return self.updates.counters

    @property
    def message_traffic(self) -> Traffic:
        """Counters of the messages that this rank has sent while training by itself."""
        return Traffic() if self.updates.mail is None else self.updates.mail.traffic

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        sgd = self.updates.sgd
        if sgd is not None:
            sgd.before_step()
        result = super().optimizer_step(*args, **kwargs)
        if sgd is not None:
            sgd.after_step()
        return result

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.updates.agree()
        return super().optimizer_state(optimizer)
