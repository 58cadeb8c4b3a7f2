"""State that is global to a process and must be each rank's own, as in processes of their own.

    rank 0 runs │ save rank 0 │ load rank 1 │ rank 1 runs

So `redirect_stdout`, `pytest.warns`, `forward_ad.dual_level` and the like may stay open over a
collective, at which ranks are switched.
"""

import ctypes
import os
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch._functorch import predispatch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from lightning_shard.backends import _c10d

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)
# Module globals that mean "this process's", and what a rank has of a module that another imports.
_MODULE_GLOBALS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("sys", "stdout"): lambda module: module.stdout,
    ("sys", "stderr"): lambda module: module.stderr,
    ("torch._functorch.eager_transforms", "JVP_NESTING"): lambda _: 0,
    ("torch.autograd.forward_ad", "_current_level"): lambda _: -1,
    ("torch._dynamo.eval_frame", "_stance"): lambda module: module.DynamoStance(),
    ("torch.distributed.tensor._random", "_rng_tracker"): lambda _: None,
    ("warnings", "filters"): lambda module: module.filters,
    ("warnings", "showwarning"): lambda module: module.showwarning,
    # what `catch_warnings(record=True)` replaces
    ("warnings", "_showwarnmsg_impl"): lambda module: module._showwarnmsg_impl,
}
_ABSENT = object()
# Where `forward_ad` looks for the functions of levels: torch 2.12 and older call the C++ ones.
_levels: Any = predispatch if hasattr(predispatch, "_enter_dual_level") else torch._C
_rank_zero = cast(Any, rank_zero_only)
_cuda = cast(Any, torch.cuda)
_np_random: Any = np.random  # its stubs leave out `get_bit_generator`


class ForwardLevel:
    """The one level of forward derivatives, which ranks share until the last has left it."""

    def __init__(self) -> None:
        self._enter, self._leave = _levels._enter_dual_level, _levels._exit_dual_level
        self._num_inside = 0

    def enter(self) -> int:
        """Enter it as the rank that runs, or raise torch's error where this rank is inside."""
        is_open = self._num_inside and forward_ad._current_level < 0
        level = 0 if is_open else self._enter()
        self._num_inside += 1
        return level

    def leave(self, *, level: int) -> None:
        """Leave it as the rank that runs."""
        self._num_inside -= 1
        if not self._num_inside:
            self._leave(level=level)


_level = ForwardLevel()
_levels._enter_dual_level, _levels._exit_dual_level = _level.enter, _level.leave

_MT19937_BYTES = 624 * 4 + 4  # the key and the position in it


def _raw_state(generator: Any) -> bytes | None:
    """Return the bit generator's memory, or None for a kind whose layout is not known."""
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


class NumpyRng:
    """A copy of numpy's global random stream, one rank's or the caller's.

    Putting another bit generator in its place takes 0.2 µs, where its full state takes 25 µs. But
    that drops numpy's spare normal number, so the full state is read whenever a number was drawn.
    """

    def __init__(self) -> None:
        self._raw: bytes | None = None
        self._spare: dict[str, Any] | None = None
        self.save()

    @classmethod
    def fork(cls) -> "NumpyRng":
        """Make a stream that begins as the process's and then goes its own way."""
        own = cls()
        state = np.random.get_state(legacy=False)
        own._generator = type(own._generator)()
        own._generator.state = {key: state[key] for key in ("bit_generator", "state")}
        return own

    def save(self) -> None:
        """Keep the process's stream as this rank's."""
        self._generator: Any = _np_random.get_bit_generator()
        raw = _raw_state(self._generator)
        if raw is not None and raw == self._raw and self._spare is None:
            return
        self._raw = raw
        state = np.random.get_state(legacy=False)
        self._spare = state if state.get("has_gauss") else None  # a normal number

    def load(self) -> None:
        """Make this rank's stream the process's."""
        _np_random.set_bit_generator(self._generator)
        if self._spare is not None:
            np.random.set_state(self._spare)


def for_all_ranks() -> AbstractContextManager[Any]:
    """Hide from one rank's dispatch modes what is computed inside, on its thread, for all.

    A selective checkpoint expects the same operations again, and another rank may come last then.
    """
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    hidden: AbstractContextManager[Any] = _disable_current_modes()
    return hidden


class RankGlobals:
    """One rank's copy of the process globals, made from the process's own as they are now."""

    def __init__(self) -> None:
        self._numpy = NumpyRng()
        self._cuda_rng: list[torch.Tensor] | None = None
        self.environment: dict[str, str | None] = {}
        self.save()

    @classmethod
    def for_rank(cls, rank: int, num_ranks: int) -> "RankGlobals":
        """Make the globals with which `rank` begins: the process's, with its own identity."""
        own = cls()
        own._numpy = NumpyRng.fork()
        own._groups = _c10d.RankGroups()
        own._rank_zero = rank
        own._module_globals["warnings", "filters"] = list(warnings.filters)
        own.environment.update(_identity(rank, num_ranks))
        return own

    def save(self) -> None:
        """Keep the process's globals as they are now, as this rank's."""
        self._groups = _c10d.current_groups()
        self._torch_rng = torch.get_rng_state()
        self._python_rng = random.getstate()
        self._numpy.save()
        if _cuda.is_initialized():
            self._cuda_rng = torch.cuda.get_rng_state_all()
        self._dtype = torch.get_default_dtype()
        self._rank_zero: Any = getattr(_rank_zero, "rank", _ABSENT)
        self._module_globals = {
            (module, name): getattr(sys.modules[module], name, _ABSENT)
            for module, name in _MODULE_GLOBALS
            if module in sys.modules
        }
        get = os.environ.get
        self.environment = {name: get(name) for name in RANK_VARIABLES}

    def load(self) -> None:
        """Make this rank's globals the process's."""
        _c10d.set_groups(self._groups)
        self._load_random_streams()
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        if self._rank_zero is not _ABSENT:
            _rank_zero.rank = self._rank_zero
        elif hasattr(_rank_zero, "rank"):
            del _rank_zero.rank
        for (module, name), begin in _MODULE_GLOBALS.items():
            if module in sys.modules:
                loaded = sys.modules[module]
                own = self._module_globals.get((module, name), _ABSENT)
                setattr(loaded, name, begin(loaded) if own is _ABSENT else own)
        for name, text in self.environment.items():
            if os.environ.get(name) != text:
                _set_variable(name, text)

    def _load_random_streams(self) -> None:
        torch.set_rng_state(self._torch_rng)
        random.setstate(self._python_rng)
        self._numpy.load()
        if not _cuda.is_initialized():
            return
        if self._cuda_rng is None:  # CUDA came up while another rank ran
            torch.cuda.manual_seed_all(torch.initial_seed())
        else:
            torch.cuda.set_rng_state_all(self._cuda_rng)


def assume_identity(rank: int, num_ranks: int) -> None:
    """Give the rank that runs another number, in a world of another size."""
    _rank_zero.rank = rank
    for name, text in _identity(rank, num_ranks).items():
        os.environ[name] = text


def _identity(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the environment variables of one rank of one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


def _set_variable(name: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text
