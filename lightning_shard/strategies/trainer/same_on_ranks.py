"""What all ranks must have alike: versions, options, the Trainer's, schedules; then results.

    groups are made        versions, strategy, Trainer       before calls depend on them
    optimizers are made    the Trainer's, schedulers         before the first step
    steps 0, 1, 2, 4 ...   the Trainer's, groups' numbers    which hooks and schedulers change
    after an epoch's end   the same

What ranks may have for themselves is left out: places, loggers, callbacks that only look.

Ranks which share every layer must be given the same batch, and compute the same: else results are
silently wrong, or ranks wait for each other for ever. They compare digests of the batches 0, 1, 2,
4, 8 ... of each loader, which finds a wrong sampler at once and a rare difference in the end, at a
cost that soon is nothing; and of those steps the loss and the gradients of parameters that are not
split, which show a weight that is used without its layer, or a plan that cuts mixed features.
"""

import platform
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, GradientAccumulationScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core import settings
from lightning_shard.data_parallel.agreement import check_alike, group_numbers
from lightning_shard.data_parallel.torch_private import forward_hooks, gradient_hooks
from lightning_shard.data_parallel.units.unsharding import looks_at_values
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import digest

_SAMPLES = 16  # elements of a gradient that are looked at, evenly spaced
# Ranks that compute alike differ by nothing, or by what accelerators do in another order each time.
_LOSS_TOLERANCE = {"cpu": 1e-6}  # relative
_LOSS_TOLERANCE_ELSEWHERE = 1e-4
_GRADIENT_TOLERANCE = 5e-2  # of a gradient's largest element: a part of it differs by about as much
_FLOOR = 1e-4  # of the largest of all gradients: smaller ones may be rounding noise


class _SharingRanks:
    """Ranks that share every layer, which compare now and then."""

    def __init__(self, group: Collectives, ranks: tuple[int, ...], device: torch.device) -> None:
        self._group, self._ranks, self._device = group, ranks, device
        self._seen: Counter[str] = Counter()

    def is_due(self, what: str) -> bool:
        """Count one more of the kind `what`; return whether to compare it."""
        index = self._seen[what]
        self._seen[what] += 1
        return not index & (index - 1)

    def _every(self, own: Tensor) -> Tensor:
        """Return the numbers of all ranks, shape (W, N)."""
        flat = own.new_empty(self._group.size * own.numel())
        self._group.all_gather(flat, own).wait()
        return flat.view(self._group.size, -1)

    def _begin(self) -> str:
        ranks = ", ".join(map(str, self._ranks))
        return f"Rank {self._ranks[self._group.rank]}: the ranks {ranks} share every layer"


class SameBatches(_SharingRanks):
    """Compares the batches of the ranks of a tensor-parallel group."""

    def check(self, batch: Any, loader: str) -> None:
        """Take the next batch of a loader; each rank of the group must call."""
        if not self.is_due(loader):
            return
        digests = self._every(torch.tensor([digest(batch)], device=self._device))[:, 0].tolist()
        strangers = [
            str(rank)
            for rank, other in zip(self._ranks, digests, strict=True)
            if other != digests[0]
        ]
        if strangers:
            raise ConfigError(
                f"{self._begin()} and must be given the same batches, but batch "
                f"{self._seen[loader] - 1} of {loader} on rank {', '.join(strangers)} is not that "
                f"of rank {self._ranks[0]}. Leave the sampler to the Trainer, or make your own "
                f"from trainer.distributed_sampler_kwargs and one seed; where samples are changed "
                f"at random, call seed_everything(seed, workers=True)."
            )


class SameResults(_SharingRanks):
    """Compares the results of the ranks of a tensor-parallel group."""

    def check_loss(self, loss: Tensor) -> None:
        """Compare a loss; each rank of the group must call."""
        every = self._every(loss.detach().to(self._device, torch.float64).view(1))
        tolerance = _LOSS_TOLERANCE.get(self._device.type, _LOSS_TOLERANCE_ELSEWHERE)
        tolerance = max(tolerance, 2 * torch.finfo(loss.dtype).eps)
        if not _is_alike(every, tolerance * every.abs().amax()):
            raise ConfigError(
                f"{self._begin()} and must compute the same loss, but it is "
                f"{_listed(every[:, 0])}. Where training_step uses a weight that is split, call "
                f"its layer instead, or leave the layer out of the plan. Random numbers that "
                f"training_step draws have to be the same on these ranks, too."
            )

    @torch.no_grad()
    def check_gradients(self, names: Sequence[str], params: Sequence[nn.Parameter]) -> None:
        """Compare gradients by some of their elements; each rank of the group must call."""
        samples = [_sample(param).to(self._device, torch.float64) for param in params]
        sizes = [len(sample) for sample in samples]
        if not any(sizes):
            return
        every = self._every(torch.cat(samples))
        floor = _FLOOR * every.abs().amax()
        for name, of_one in zip(names, torch.split(every, sizes, dim=1), strict=True):
            scale = of_one.abs().amax().clamp_min(floor) if of_one.numel() else floor
            if not _is_alike(of_one, _GRADIENT_TOLERANCE * scale):
                worst = int((of_one - of_one[0]).abs().amax(0).argmax())
                raise ConfigError(
                    f"{self._begin()} and must have the same gradient of {name}, which is not "
                    f"split, but an element of it is {_listed(of_one[:, worst])}. A module that "
                    f"works between two split layers has to be in the plan as "
                    f"'replicated_with_grad_allreduce'; layers whose weight or result is used "
                    f"elsewhere have to be left out of it."
                )


def _is_alike(every: Tensor, tolerance: Tensor) -> bool:
    """Whether the ranks' numbers, shape (W, N), are the same; overflows are not compared."""
    spread = (every - every[0]).abs()
    return bool((spread <= tolerance).all()) or not bool(every.isfinite().all())


def _sample(param: nn.Parameter) -> Tensor:
    flat = (torch.zeros_like(param) if param.grad is None else param.grad).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)]


def _listed(numbers: Tensor) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers.tolist())


_ADVICE = "Give every rank the same: one script, with the same arguments, and one environment."
_APART_ADVICE = (
    "Set it on every rank alike: decide by what all ranks have, such as trainer.callback_metrics "
    "at an epoch's end, or self.all_gather(value).mean()."
)
_HOOK_ADVICE = (
    " Hooks that a logger's watch() makes are on rank 0 alone: use it with strategy='zero2', or "
    "give the logger what it is to show on every rank, in on_before_optimizer_step."
)
_OF_TRAINER = (
    "accumulate_grad_batches gradient_clip_val gradient_clip_algorithm precision max_epochs "
    "max_steps min_epochs min_steps val_check_interval check_val_every_n_epoch limit_train_batches "
    "limit_val_batches limit_test_batches limit_predict_batches overfit_batches fast_dev_run "
    "reload_dataloaders_every_n_epochs num_nodes"
)
_OF_RANK = {"accelerator", "parallel_devices", "cluster_environment", "announce", "choice_file"}
_DECIDING = (Checkpoint, EarlyStopping, GradientAccumulationScheduler)
_EVERY = 64  # steps, at most, from one comparison to the next


def started_with(strategy: Any, trainer: "pl.Trainer | None" = None) -> dict[str, Any]:
    """Return by name what ranks were started with."""
    known = signature(type(strategy)).parameters.values()
    defaults = {one.name: one.default for one in known if one.default is not one.empty}
    options = defaults | strategy.given_options[1]
    mine: dict[str, Any] = {f"the version of {name}": one for name, one in versions().items()}
    mine["the strategy"] = type(strategy).__name__
    mine |= {f"strategy({name})": one for name, one in options.items() if name not in _OF_RANK}
    if trainer is not None:
        mine["Trainer(num_sanity_val_steps)"] = trainer.num_sanity_val_steps
    return mine | _of_trainer(trainer)


def check_same_settings(
    strategy: Any, collectives: Collectives, trainer: "pl.Trainer | None" = None
) -> None:
    """Compare what ranks were started with; each must call, before it makes other groups."""
    check_alike(started_with(strategy, trainer), collectives, "settings", _ADVICE)


def common_seed(collectives: Collectives) -> int | None:
    """Return rank 0's seed and warn where others have another; else None. Each rank must call."""
    seeds: list[int] = collectives.all_gather_object(settings.global_seed())
    other = next((rank for rank, seed in enumerate(seeds) if seed != seeds[0]), 0)
    if not other:
        return None
    rank_zero_warn(
        f"Ranks have different seeds: {seeds[0]} on rank 0, {seeds[other]} on rank {other}. A "
        f"DistributedSampler shuffles by rank 0's on all; but what the script draws itself "
        f"(random_split, a sampler of its own) differs between ranks, so that some samples come "
        f"twice and others never. Call seed_everything with one seed on all ranks."
    )
    return seeds[0]


def schedules(trainer: "pl.Trainer") -> dict[str, Any]:
    """Return schedulers' numbers by name, and the Trainer's options as hooks have left them."""
    configs = trainer.lr_scheduler_configs
    kinds = [type(one.scheduler).__name__ for one in configs]
    mine = {**_of_trainer(trainer), "the schedulers": kinds}
    for number, config in enumerate(configs):
        told = {**vars(config), **config.scheduler.state_dict(), "scheduler": kinds[number]}
        mine |= {f"{key} of scheduler {number}": one for key, one in told.items()}
    return mine


class SettingsOfSteps:
    """Compares what hooks and schedulers may change while ranks train."""

    def __init__(self, collectives: Collectives, numbers: str = "") -> None:
        self._collectives, self._numbers = collectives, numbers
        self._compared, self.are_due = -1, False

    def before_step(self, trainer: "pl.Trainer") -> None:
        """Compare at the steps 0, 1, 2, 4, 8 ..., at each 64th, and where due; each must call."""
        step = trainer.global_step
        is_new = step != self._compared and (not step & (step - 1) or step % _EVERY == 0)
        if is_new or self.are_due:
            self._compared, self.are_due = step, False
            self.check(trainer)

    def check(self, trainer: "pl.Trainer") -> None:
        """Compare now; each rank must call."""
        strategy: Any = trainer.strategy
        clipped_by = strategy.precision_plugin.clipped_by  # in a call of clip_gradients
        numbers = {"the last clip value": clipped_by, **group_numbers(trainer.optimizers)}
        mine = {name: one for name, one in numbers.items() if name.startswith(self._numbers)}
        what, hooks = f"settings by step {trainer.global_step}", _hooks_on_parts(trainer)
        advice = _APART_ADVICE + _HOOK_ADVICE * bool(strategy.engine.split.groups)
        check_alike(mine | _of_trainer(trainer) | hooks, self._collectives, what, advice)


def _hooks_on_parts(trainer: "pl.Trainer") -> dict[str, list[str]]:
    """Return which hooks user code has where ranks must take part in a gradient, or a call.

    A hook counts once for each part: transformers makes those that keep hidden states anew for each
    copy of a layer, of which stages make as many as they need.
    """
    strategy: Any = trainer.strategy
    model, split = strategy.engine.model, strategy.engine.split
    if not split.groups:
        return {}
    hooks: dict[str, list[Any]] = {
        f"the gradient of {name!r}": [*gradient_hooks(param).values()]
        for name, param in model.named_parameters()
    }
    hooks |= {repr(name): forward_hooks(one) for name, one in model.named_modules()}
    found = {name: sorted(set(filter(None, map(_users, one)))) for name, one in hooks.items()}
    return {f"the hooks on {name}": of_users for name, of_users in found.items() if of_users}


def _users(hook: Any) -> str:
    """Return what a hook of the user's is called; nothing for torch's, and for our own."""
    written = getattr(hook, "hook", hook)  # which a split layer's is around
    if not looks_at_values(written):
        return ""
    while isinstance(written, partial):
        written = written.func
    module = getattr(written, "__module__", "")
    own = {__name__.partition(".")[0], "torch"}
    name = getattr(written, "__qualname__", type(written).__qualname__)
    return "" if module.partition(".")[0] in own else f"{module}.{name}"


def versions() -> dict[str, str]:
    """Return the versions that ranks must have alike."""
    try:
        own = metadata.version("lightning-shard")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        own = "unknown"
    lightning, python = pl.__name__.partition(".")[0], platform.python_version_tuple()
    found = {
        "lightning_shard": own,
        "torch": str(torch.__version__),
        lightning: vars(pl)["__version__"],
    }
    return {**found, "Python": ".".join(python[:2])}


def _of_trainer(trainer: "pl.Trainer | None") -> dict[str, Any]:
    if trainer is None:
        return {}
    mine = {f"Trainer({name})": getattr(trainer, name, None) for name in _OF_TRAINER.split()}
    mine["what the Trainer runs"] = trainer.state.fn
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    deciding = [one for one in callbacks if isinstance(one, _DECIDING)]
    for number, one in enumerate(deciding):
        told = {name: getattr(one, name, None) for name in ("save_top_k", "patience", "scheduling")}
        mine[f"deciding callback {number}"] = (one.state_key, told)
    return mine
