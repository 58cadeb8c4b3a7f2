"""Copies of a model that user code makes while ZeRO stage 3 has it in shards.

    self.ema = copy.deepcopy(net)     each parameter of the copy is this rank's shard, also before
                                      the first step, when the model itself is still full
    ema and net, element by element   equal shards meet
    self.ema(x)                       gathered for the call, and in shards again after it
    the end of the run                gathered for good

A copy's modules carry the hooks of the modules that they were copied from: these are what tells of
its calls. Each rank must make, call and keep the same copies.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.sharded_parameter import (
    ShardedParameter,
    as_they_are,
    copy_home,
    move_out,
    present,
    take_set,
)
from lightning_shard.errors import ConfigError

_Home = tuple[FlatParameters, int]


class ShardCopies:
    """The copies of some parameters.

    Args:
        flats: Buffers of the parameters, under stage 3.
        shows_full: Returns whether a parameter that is full now is copied as it is.
    """

    def __init__(self, flats: Sequence[FlatParameters], shows_full: Callable[[], bool]) -> None:
        self._homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of copies
        self._made = 0
        self._depth = 0
        self._shards: list[tuple[nn.Parameter, Tensor]] = []  # while their copies are full
        self._looked_full: list[nn.Parameter] = []  # those of them that seemed to be
        self._params = [param for flat in flats for param in flat.params]
        self._originals = [(flat, index) for flat in flats for index in range(len(flat.params))]
        for flat in flats:
            for index, param in enumerate(flat.params):
                vars(param)["__deepcopy__"] = _Copier(self, (flat, index), shows_full)

    @torch.no_grad()
    def copy(self, home: _Home, *, full: bool) -> nn.Parameter:
        """Return a copy of a parameter: this rank's shard, or the full tensor that it shows."""
        flat, index = home
        param = flat.params[index]
        if full:
            return nn.Parameter(param.data.clone(), param.requires_grad)
        flat.see_assigned()
        made = nn.Parameter(flat.local_views[index].clone(), param.requires_grad)
        copy_home(param, made)
        self._homes[made] = (home, self._made)
        self._made += 1
        return made

    def _alive(self) -> dict[int, tuple[nn.Parameter, _Home]]:
        """Return by number the copies that user code still has, each with its original's place."""
        copies = self._homes.items()  # type: ignore[no-untyped-call]
        return {number: (copy, home) for copy, (home, number) in copies}

    @as_they_are
    def take_set(self) -> None:
        """Let copies that user code has set to full tensors be this rank's shards again."""
        for copy, (flat, index) in self._alive().values() if not self._depth else ():
            take_set(copy, flat.local_views[index])

    def own(self, module: nn.Module) -> bool:
        """Whether a module holds copies that were made here."""
        return any(param in self._homes for param in module.parameters())

    def check_entered(self, part: nn.Module) -> None:
        """Raise ConfigError unless a part of a copied block is called by its block's forward."""
        if not self._depth:
            raise ConfigError(
                f"A {type(part).__name__} inside a block of a copy that was made during the run "
                f"is called by itself, but under ZeRO stage 3 it is one rank's shards; expected a "
                f"call of the block, for which it is gathered. Call the copied network or block."
            )

    def enter(self, module: nn.Module) -> None:
        """Make a copied module full for a call; each rank must call.

        Raises:
            ConfigError: The call would record gradients of the copy.
        """
        self._depth += 1
        if self._depth > 1:
            return
        params = [param for param in module.parameters() if param in self._homes]
        if torch.is_grad_enabled() and any(param.requires_grad for param in params):
            self._depth -= 1
            self._refuse(module)
        self._looked_full = [param for param in params if type(param) is ShardedParameter]
        present(self._looked_full, sharded=False)
        self._shards = [(param, param.data) for param in params]
        self._gather(params)

    def leave(self) -> None:
        """End a call of a copied module."""
        self._depth -= 1
        if self._depth == 0:
            for param, shard in self._shards:
                param.data = shard
            present(self._looked_full, sharded=True)
            self._shards, self._looked_full = [], []

    def _refuse(self, module: nn.Module) -> NoReturn:
        raise ConfigError(
            f"A copy of a {type(module).__name__} that was made during the run is called with "
            f"gradients, but under ZeRO stage 3 it is this rank's shards and cannot be trained; "
            f"expected a call without. Call it within torch.no_grad(), freeze it with "
            f"requires_grad_(False), or make the copy in __init__ or configure_model, as a part of "
            f"the module."
        )

    @as_they_are
    @torch.no_grad()
    def _gather(self, params: Iterable[nn.Parameter]) -> None:
        """Make copies full, buffer by buffer."""
        batches: dict[tuple[FlatParameters, int], dict[int, nn.Parameter]] = {}
        for param in params:
            (flat, index), _ = self._homes[param]
            nth = 0
            while index in batches.get((flat, nth), ()):
                nth += 1
            batches.setdefault((flat, nth), {})[index] = param
        for (flat, _), copies in batches.items():
            shard = torch.zeros_like(flat.shard)
            views = flat.shard_views(shard)
            for index, param in copies.items():
                views[index].copy_(param.data)
            full = flat.gather_shards(shard)
            for index, param in copies.items():
                param.data = full[index].to(param.dtype, copy=True)

    @as_they_are
    def numbered_shards(self) -> dict[tuple[int, int], int]:
        """Return a number for each shard here by address and size, the same on every rank."""
        views = [flat.local_views[index] for flat, index in self._originals]
        numbered = dict(enumerate(views))
        for made, (copy, _) in self._alive().items():
            numbered[len(views) + made] = copy.data
        return {(view.data_ptr(), view.numel()): number for number, view in numbered.items()}

    @as_they_are
    def full(self, number: int) -> Tensor:
        """Return the full tensor of the shard with this number; each rank must have it and call."""
        if number < len(self._originals):
            flat, index = self._originals[number]
            return flat.full_values()[index]
        made = number - len(self._originals)
        copy, (flat, index) = self._alive()[made]
        shard = torch.zeros_like(flat.shard)
        flat.shard_views(shard)[index].copy_(copy.data)
        return flat.gather_shards(shard)[index]

    @torch.no_grad()
    def restore(self, agree: Callable[[set[int]], set[int]] | None) -> None:
        """End the run: copy parameters plainly again, and make copies full.

        Args:
            agree: Returns those of this rank's shard numbers that all ranks have; each rank must
                call. None leaves copies as shards, when peers may be gone.
        """
        for param in self._params:
            vars(param).pop("__deepcopy__", None)
        alive = self._alive()
        for copy, _ in alive.values():
            move_out(copy)
        if agree is None:
            return
        self._gather([alive[number][0] for number in sorted(agree(set(alive)))])
        self._homes = WeakTensorKeyDictionary()


class _Copier:
    """Makes the copy of one parameter for `copy.deepcopy`."""

    def __init__(self, copies: ShardCopies, home: _Home, shows_full: Callable[[], bool]) -> None:
        self._copies, self._home, self._shows_full = copies, home, shows_full

    def __call__(self, memo: dict[int, Any]) -> nn.Parameter:
        flat, index = self._home
        is_full = type(flat.params[index]) is not ShardedParameter and (
            flat.params[index].shape == flat.layout.slots[index].shape
        )
        return self._copies.copy(self._home, full=is_full and self._shows_full())

    def __reduce__(self) -> NoReturn:
        flat, index = self._home
        raise ConfigError(
            f"The parameter {flat.layout.slots[index].name!r} is pickled during a run of ZeRO "
            f"stage 3, in which each rank has a shard of it; expected its values only. Save with "
            f"trainer.save_checkpoint, or after the run."
        )
