"""Runs the user's module: on ranks with the user's own data, and again on recorded batches.

ranks, own data ──records──> batches of each rank ──joined──> one device
                                    └──────────────────────> ranks again, with one thing changed
"""

import copy
import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_shard.core.extensions import instead
from lightning_shard.data_parallel.torch_private import in_backward
from lightning_shard.environments.launchers._copy import copy_with_functions
from lightning_shard.errors import ConfigError, ShardError
from lightning_shard.tools.proving.changes import Change, share_storages
from lightning_shard.tools.proving.records import (
    Kind,
    Phase,
    Place,
    Record,
    Records,
    Sink,
    group_option_name,
    is_number,
)
from lightning_shard.tools.proving.strategies import (
    QUIET_OPTIONS,
    StrategyLike,
    batches_seen,
    for_replay,
    full_gradients,
    places,
    quiet,
    strategy_in_process,
    trains_by_itself,
)

Join = Callable[[list[Any]], Any]


# The ranks' batches, joined into the batch of one device, and taken apart.
#
#     rank 0   x (4, 8)  y (4,)                       one device   x (8, 8)  y (8,)
#     rank 1   x (4, 8)  y (4,)      ── joined ──>
#
# Tensors and arrays are joined along their first dimension, lists of strings and the like one after
# the other; what is equal on all ranks stays as it is.


def join_batches(batches: Sequence[Any]) -> Any:
    """Return one batch of the samples of several."""
    first = batches[0]
    if len(batches) == 1:
        return copy.deepcopy(first)
    if isinstance(first, Tensor):
        return _joined_tensors(batches)
    if isinstance(first, Mapping):
        joined = {key: join_batches([one[key] for one in batches]) for key in first}
        return joined if type(first) is dict else _like(first, joined)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join_batches(parts) for parts in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        if first and all(isinstance(one, str | bytes) for one in first):
            return type(first)(item for one in batches for item in one)
        return type(first)(join_batches(parts) for parts in zip(*batches, strict=True))
    if all(type(one) is type(first) and one == first for one in batches):
        return first
    raise ConfigError(
        f"A batch holds {type(first).__name__}, which differs from rank to rank and of which prove "
        f"does not know how several become one. Pass prove(join=...), a function of the ranks' "
        f"batches that returns one device's."
    )


def _like(first: Mapping[Any, Any], joined: dict[Any, Any]) -> Any:
    made = copy.copy(first)
    made.update(joined)  # type: ignore[attr-defined]
    return made


def _joined_tensors(tensors: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(one.shape[1:]) for one in tensors}
    if tensors[0].ndim == 0:
        if all(torch.equal(one, tensors[0]) for one in tensors):
            return tensors[0].clone()
        raise ConfigError(
            "A batch holds a number that differs from rank to rank, and prove does not know what "
            "it is for all of them. Pass prove(join=...)."
        )
    if len(shapes) > 1:
        raise ConfigError(
            f"The ranks' batches have tensors of the shapes "
            f"{', '.join(str(tuple(one.shape)) for one in tensors)}, which one device's batch "
            f"cannot hold one after the other. Pad every batch to one length, or pass "
            f"prove(join=...), a function of the ranks' batches that returns one device's."
        )
    return torch.cat(list(tensors))


def halves(batch: Any) -> list[Any]:
    """Return the two halves of a batch; the batch alone where nothing in it can be cut."""
    sizes = {one.shape[0] for one in tensors_of(batch) if one.ndim > 0}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return [batch]
    cuts = [(0, size // 2), (size // 2, size // 2 * 2)]
    return [_picked(batch, list(range(first, stop))) for first, stop in cuts]


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    inside = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(inside, str | bytes) or not hasattr(inside, "__iter__"):
        return []
    return [tensor for one in inside for tensor in tensors_of(one)]


def samples_of(batch: Any) -> list[bytes]:
    """Return each sample as bytes, by which equal ones are found; none if they cannot be told."""
    tensors = [one for one in tensors_of(batch) if one.ndim > 0]
    if not tensors or len({one.shape[0] for one in tensors}) != 1:
        return []
    rows = range(tensors[0].shape[0])
    return [b"".join(one[row].contiguous().numpy().tobytes() for one in tensors) for row in rows]


def repeated(batches: Sequence[Sequence[Any]]) -> tuple[int, int, int] | None:
    """Return where a sample comes a second time: the first rank, the other rank, and its batch."""
    seen: dict[bytes, tuple[int, int]] = {}
    for number, of_ranks in enumerate(zip(*batches, strict=True)):
        for rank, batch in enumerate(of_ranks):
            for sample in samples_of(batch):
                first = seen.setdefault(sample, (rank, number))
                if first[0] != rank:
                    return first[0], rank, number
    return None


def num_repeats(batches: Sequence[Any]) -> int:
    """Return how many samples of one device's batches came before."""
    counts = Counter(sample for batch in batches for sample in samples_of(batch))
    return sum(count - 1 for count in counts.values())


def reordered(batch: Any, order: Callable[[int], list[int]]) -> Any:
    """Return a batch's samples in another order; the batch itself where they cannot be told."""
    sizes = {one.shape[0] for one in tensors_of(batch) if one.ndim > 0}
    return batch if len(sizes) != 1 else _picked(batch, order(sizes.pop()))


def _picked(value: Any, places: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value[places] if value.ndim else value
    if isinstance(value, Mapping):
        return _like(value, {key: _picked(one, places) for key, one in value.items()})
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str | bytes) for one in value):
            return type(value)(value[place] for place in places if place < len(value))
        parts = [_picked(one, places) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


# The callback that records a run, on one device and on each rank.
#
# What a user's module computes is read where user code could read it, too: outputs in forward
# hooks, gradients before and after `configure_gradient_clipping`, full weights from the strategy.
# Gathering is collective, and every rank reads the same in the same order.

# How an optimizer computes, not what.
_NOT_COMPARED = ("params", "foreach", "fused", "capturable", "differentiable")
_LOG = inspect.signature(pl.LightningModule.log)


class Recorder(Callback):
    """Records a fit into a sink."""

    def __init__(self, sink: Sink, accumulate: int = 1) -> None:
        self._sink, self._accumulate = sink, accumulate
        self._record = Record()
        self._batch_idx = 0
        self._in_step = False
        self._in_fit = ExitStack()

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        rank, data_rank, num_data_ranks = places(trainer.strategy)
        self._record = Record(rank=rank, data_rank=data_rank, num_data_ranks=num_data_ranks)
        self._sink.records[rank] = self._record
        enter = self._in_fit.enter_context
        seen = self._record.batches
        enter(
            batches_seen(trainer, lambda one: seen.append(tree_map_only(Tensor, torch.clone, one)))
        )
        for name, noting in (
            ("log", self._log),
            ("all_gather", self._gather),
            ("configure_gradient_clipping", self._clip),
        ):
            enter(instead(pl_module, name, partial(noting, pl_module)))
        for name, module in pl_module.named_modules():
            if name:
                handle = module.register_forward_hook(self._noting_output(name))
                self._in_fit.callback(handle.remove)

    def _log(
        self, module: "pl.LightningModule", log: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
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

    def _gather(self, _: Any, gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._record.num_gathers += 1
        return gather(*args, **kwargs)

    def _clip(
        self, module: "pl.LightningModule", clip: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        clip(*args, **kwargs)
        self._note_gradients(module, "clipping")

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
        has_micro = phase in ("forward", "loss", "micro-batch")
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
        # A pipeline brings buffers of other stages where every rank reads them.
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        if trainer.is_global_zero or trains_by_itself(trainer.strategy):
            state = {**buffers, **state}
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
        self, trainer: "pl.Trainer", module: "pl.LightningModule", number: int, optimizer: Optimizer
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
    def on_exception(self, *_: Any, **__: Any) -> None:
        self._in_fit.close()


EXACT = "64-true"
"""The precision in which differences are told from rounding."""

TAKEN = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "sync_batchnorm",
    "use_distributed_sampler",
    "callbacks",
    "inference_mode",
    "detect_anomaly",
)
"""The Trainer's options that may change what is trained."""


class RunFailedError(Exception):
    """The user's own code has raised an error in a run, which is the cause of this one."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if `trainer_options` has what a proof cannot take."""
    unknown = [name for name in options if name not in TAKEN]
    if unknown:
        raise ConfigError(
            f"prove(trainer_options=...) got {', '.join(sorted(unknown))}, expected options that "
            f"change what is trained: {', '.join(TAKEN)}. The number of ranks, the precision and "
            f"the steps are arguments of prove itself."
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is proved."""

    module: pl.LightningModule
    data: Any
    strategy: StrategyLike
    num_ranks: int
    num_steps: int = 3
    precision: str = "32-true"
    seed: int = 0
    join: Join = join_batches
    options: Mapping[str, Any] = field(default_factory=dict)
    recorder: type[Recorder] = Recorder

    @property
    def accumulate(self) -> int:
        """Batches of one optimizer step."""
        return int(self.options.get("accumulate_grad_batches", 1))

    def without_accumulation(self) -> "Subject":
        """Return the same, with one batch for each optimizer step."""
        return replace(self, options={**self.options, "accumulate_grad_batches": 1})

    def fresh_module(self, change: Change | None = None) -> pl.LightningModule:
        """Return a copy of the module as it was given, changed by `change`."""
        module: pl.LightningModule = copy_with_functions(self.module, {}, [self.module], ())
        if self.precision == EXACT:
            module.double()
        share_storages(module, self.module)
        if change is not None:
            change(module)
        return module

    def on_ranks(
        self,
        batches: Sequence[Sequence[Any]] | None = None,
        *,
        change: Change | None = None,
        strategy: StrategyLike | None = None,
        num_ranks: int | None = None,
    ) -> Records:
        """Run under the strategy."""
        number = num_ranks or self.num_ranks
        made = strategy_in_process(strategy or self.strategy, number)
        if batches is not None:
            made = for_replay(made, number)
        return self._fit(self.fresh_module(change), made, number, batches)

    def on_one_device(
        self,
        batches: Sequence[Any] | None,
        *,
        change: Change | None = None,
        seed: int | None = None,
    ) -> Records:
        """Run on one device on these batches, or on the user's own data."""
        given = None if batches is None else [batches]
        return self._fit(self.fresh_module(change), "auto", 1, given, seed)

    def joined(self, batches: Sequence[Sequence[Any]]) -> list[Any]:
        """Return one device's batches."""
        return [self.join(list(of_ranks)) for of_ranks in zip(*batches, strict=True)]

    def _fit(
        self,
        module: pl.LightningModule,
        strategy: Strategy | str,
        num_ranks: int,
        batches: Sequence[Sequence[Any]] | None,
        seed: int | None = None,
    ) -> Records:
        sink = Sink()
        options = {**QUIET_OPTIONS, "max_epochs": 1, **self.options}
        callbacks = copy.deepcopy(list(self.options.get("callbacks") or ()))
        recorder = self.recorder(sink, self.accumulate)
        with quiet():
            _draw_from(self.seed if seed is None else seed)
            trainer = pl.Trainer(
                **{**options, "callbacks": [*callbacks, recorder]},
                strategy=strategy,
                devices=num_ranks,
                precision=self.precision,  # type: ignore[arg-type]
                limit_train_batches=self.num_steps * self.accumulate,
            )
            where = "on one device" if isinstance(strategy, str) else f"on {num_ranks} ranks"
            with _told(where):
                trainer.fit(module, **self._data(module, batches))
        if not sink.records or not sink.records[0].batches:
            raise ConfigError(
                f"{type(self.module).__name__} was given no batch to train on, so there is nothing "
                f"to compare. Pass data that has at least one batch for each rank."
            )
        return Records(records=[sink.records[rank] for rank in sorted(sink.records)])

    def _data(
        self, module: pl.LightningModule, batches: Sequence[Sequence[Any]] | None
    ) -> dict[str, Any]:
        is_module = isinstance(self.data, pl.LightningDataModule)
        if batches is None:
            data = copy.deepcopy(self.data) if is_module else self.data
            return {"datamodule": data} if is_module else {"train_dataloaders": data}
        owner = copy.deepcopy(self.data) if is_module else pl.LightningDataModule()
        owner.train_dataloader = partial(_replay, owner, batches)  # type: ignore[method-assign]
        return {"datamodule": owner}


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Tell errors of the user's code from those of this package."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        raise RunFailedError(f"{type(error).__name__} {where}: {error}") from error


class _RecordedBatches:
    """Gives recorded batches, each time copies, since a step may write into them."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter([copy.deepcopy(one) for one in self._batches])


def _replay(owner: pl.LightningDataModule, batches: Sequence[Sequence[Any]]) -> _RecordedBatches:
    assert owner.trainer is not None
    place = owner.trainer.distributed_sampler_kwargs or {"rank": 0}
    return _RecordedBatches(batches[place["rank"]])


def _draw_from(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
