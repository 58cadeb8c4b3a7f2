"""The callback that records a run, on one device and on each rank.

What a user's module computes is read where user code could read it, too: outputs in forward hooks,
gradients before and after `configure_gradient_clipping`, full weights from the strategy. Gathering
is collective, and every rank reads the same in the same order.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_shard.data_parallel.torch_private import in_backward
from lightning_shard.proving.records import (
    Kind,
    Phase,
    Place,
    Record,
    Sink,
    group_option_name,
    is_number,
)
from lightning_shard.proving.strategies import full_gradients, places, trains_by_itself

# How an optimizer computes, not what.
_NOT_COMPARED = ("params", "foreach", "fused", "capturable", "differentiable")
_LOG = inspect.signature(pl.LightningModule.log)


class Recorder(Callback):
    """Records a fit into a sink.

    Args:
        sink: Where the ranks' records are kept.
        accumulate: Batches of one optimizer step.
        with_outputs: Whether what modules return is recorded, too.
    """

    def __init__(self, sink: Sink, accumulate: int = 1, *, with_outputs: bool = True) -> None:
        self._sink, self._accumulate, self._with_outputs = sink, accumulate, with_outputs
        self._record = Record()
        self._batch_idx = 0
        self._in_step = False
        self._in_fit = ExitStack()
        self._num_before: dict[str, int] = {}

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        rank, data_rank, num_data_ranks = places(trainer.strategy)
        self._record = Record(rank=rank, data_rank=data_rank, num_data_ranks=num_data_ranks)
        self._sink.records[rank] = self._record
        enter = self._in_fit.enter_context
        enter(self._noting_batches(trainer))
        enter(self._noting_logs(pl_module))
        enter(self._noting_gathers(pl_module))
        enter(self._after_clipping(pl_module))
        for name, module in pl_module.named_modules() if self._with_outputs else ():
            if name:
                handle = module.register_forward_hook(self._noting_output(name))
                self._in_fit.callback(handle.remove)

    @contextmanager
    def _noting_batches(self, trainer: "pl.Trainer") -> Iterator[None]:
        """The precision plugin is the first that is given a batch; see `training_epoch_loop`."""
        plugin = trainer.precision_plugin
        convert = plugin.convert_input

        def note(batch: Any) -> Any:
            self._record.batches.append(tree_map_only(Tensor, torch.clone, batch))
            return convert(batch)

        with patch.object(plugin, "convert_input", note):
            yield

    @contextmanager
    def _noting_logs(self, module: "pl.LightningModule") -> Iterator[None]:
        log = module.log

        def noted(*args: Any, **kwargs: Any) -> None:
            given = _LOG.bind(module, *args, **kwargs).arguments
            is_value = not isinstance(given["value"], nn.Module)  # a metric reduces itself
            if is_value and not given.get("sync_dist"):
                self._record.unsynced.add(given["name"])
                if given.get("on_epoch") or not self._in_step:
                    self._record.epoch_metrics.add(given["name"])
                if self._in_step and given.get("on_step") is not False:
                    name = f"{given['name']}_step" if given.get("on_epoch") else given["name"]
                    self._record.step_values[name] = float(given["value"])
            log(*args, **kwargs)

        with patch.object(module, "log", noted):
            yield

    @contextmanager
    def _noting_gathers(self, module: "pl.LightningModule") -> Iterator[None]:
        gather = module.all_gather

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._record.num_gathers += 1
            return gather(*args, **kwargs)

        with patch.object(module, "all_gather", noted):
            yield

    @contextmanager
    def _after_clipping(self, module: "pl.LightningModule") -> Iterator[None]:
        clip = module.configure_gradient_clipping

        def noted(*args: Any, **kwargs: Any) -> None:
            clip(*args, **kwargs)
            self._note_gradients(module, "clipping")

        with patch.object(module, "configure_gradient_clipping", noted):
            yield

    def _noting_output(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if not self._in_step or in_backward():  # there it is computed again
                return
            leaves = tree_leaves(output)
            for number, leaf in enumerate(leaves):
                # neither placeholders nor tensors whose elements lie on several ranks
                if type(leaf) in (Tensor, nn.Parameter):
                    full_name = f"{name}[{number}]" if len(leaves) > 1 else name
                    self._add("forward", "output", full_name, leaf)

        return note

    def _add(self, phase: Phase, kind: Kind, name: str, value: Tensor) -> None:
        step, micro = divmod(self._batch_idx, self._accumulate)
        has_micro = phase in ("forward", "loss")
        self._record.add(Place(step, micro if has_micro else 0, phase, kind, name), value)

    def _note_gradients(self, module: "pl.LightningModule", phase: Phase) -> None:
        for name, grad in reversed(full_gradients(module)):
            self._add(phase, "gradient", name, grad)

    def _note_state(
        self, trainer: "pl.Trainer", module: "pl.LightningModule", phase: Phase
    ) -> None:
        params = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if trains_by_itself(trainer.strategy):
            state = module.state_dict()
        else:
            state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero or trains_by_itself(trainer.strategy):
            state = {**dict(module.named_buffers()), **state}
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self._add(phase, "weight" if name in params else "buffer", name, value)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        if batch_idx > 0 and batch_idx % self._accumulate == 0:
            self._note_state(trainer, pl_module, "hooks after the update")
        self._batch_idx, self._in_step = batch_idx, True

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        self._note_gradients(pl_module, "backward")

    @override
    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._in_step = False
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._add("loss", "loss", "loss", loss)
        if (batch_idx + 1) % self._accumulate:
            return
        for number, optimizer in enumerate(trainer.optimizers):
            self._note_options(number, optimizer)
        self._note_state(trainer, pl_module, "update")
        for number, optimizer in enumerate(trainer.optimizers):
            self._note_optimizer(trainer, pl_module, number, optimizer)

    def _note_options(self, number: int, optimizer: Optimizer) -> None:
        for at, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if option not in _NOT_COMPARED and is_number(value):
                    name = group_option_name(option, at, number)
                    value = torch.as_tensor(value, dtype=torch.float64)
                    self._add("update", "optimizer state", name, value)

    def _note_optimizer(
        self,
        trainer: "pl.Trainer",
        module: "pl.LightningModule",
        number: int,
        optimizer: Optimizer,
    ) -> None:
        names = {param: name for name, param in module.named_parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        is_own = trains_by_itself(trainer.strategy)
        state: dict[str, Any] = (
            dict(optimizer.state_dict()) if is_own else trainer.strategy.optimizer_state(optimizer)
        )
        entries_of: dict[Any, Any] = state.get("state", {})
        is_told = is_own or trainer.is_global_zero
        for at, entries in entries_of.items() if is_told else ():
            param = names.get(params[at], f"parameter {at}") if isinstance(at, int) else at
            for key, value in entries.items() if isinstance(entries, dict) else ():
                if isinstance(value, Tensor):
                    self._add("update", "optimizer state", f"{key} of {param}", value)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._note_state(trainer, pl_module, "hooks after the update")
        for name, value in trainer.callback_metrics.items():
            self._add("log", "metric", name, value)
        self._in_fit.close()

    @override
    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        self._in_fit.close()
