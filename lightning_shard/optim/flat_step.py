"""An optimizer's step on a few long pieces of shards, in place of every parameter's own shard.

    a buffer's shard     [ w1 | b1 | w2 | b2 | w3 ]    parameters of one param group lie together
    group["params"]      [          piece         ]    while the optimizer steps
    entries of the piece   exp_avg [ m1 | .. | m2 | .. ]     step: one number
    state[w1]              exp_avg: m1 in that memory        step: one of several numbers, all equal

So a step costs the host nothing for each parameter, and updates are those of the parameters by
themselves, since the optimizer is one of torch's element-wise ones, exactly. Each parameter by
itself is updated

- under offload or compression, and where the model is split over ranks in other ways, too, or an
  optimizer needs some parameters full;
- where some parameters of a buffer have a gradient, and others none;
- where their entries in the optimizer's state differ in kind, or in the number of steps;
- where groups alternate in a buffer, so that pieces would be many and short;
- in 16 bits under `same_bits`, see `_rounds_by_place`;
- where hooks look at parameters within the step, or one of the options does (`_needs_each`).

Everybody but the stepping optimizer has the parameters' own tensors, which lie in the piece's
memory, and may edit or exchange them: nothing is remembered that a step does not check. Padding
between the shards is zero, as are its gradients, and stays so.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Adam, AdamW, Optimizer

from lightning_shard.backends.rank_order import is_narrow
from lightning_shard.core.layout import ShardSlice
from lightning_shard.data_parallel.compression import Exchange
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.views.tensor_properties import VERSION, addresses_of
from lightning_shard.errors import ConfigError


class FrozenAdam:
    """Takes Adam's steps under a second moment that is frozen when a compressor's warm-up ends.

        p -= lr m / (sqrt(v) + eps)    v: as it was when the warm-up ended
                                       m: what came, if momentum travels; else made of it

    What error feedback sends comes late and all at once, and Adam would divide each spike by
    itself. Under a fixed v it counts in full, up to a limit for each step. The optimizer's own step
    passes over these parameters, which have no gradient then, and leaves their counter of steps.

    Source: 1-bit Adam, arXiv:2102.02888, algorithm 1.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._compresses = bool(engine.exchanges)
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        for group in optimizer.param_groups:
            for exchange in map(engine.exchange_of, group["params"]):
                if exchange is not None and exchange.freezes_variance:
                    _check_adam(optimizer, group, exchange)
                elif exchange is not None and exchange.keeps_momentum:
                    _check_no_momentum(optimizer, group)
        self._tell_factor()

    def take(self) -> None:
        """Update what has a frozen second moment, and hide it from the optimizer's own step."""
        for group in self._optimizer.param_groups if self._compresses else ():
            for param in group["params"]:
                exchange = self._engine.exchange_of(param)
                if exchange is None or not exchange.froze_variance or param.grad is None:
                    continue
                state = self._optimizer.state.get(param, {})
                if "exp_avg_sq" in state and state["step"] >= exchange.variance_steps:
                    self._update(param, state, group, exchange)
                    self._set_aside.append((param, param.grad))
                    param.grad = None

    def put_back(self) -> None:
        """Give the parameters back the gradients that were hidden from the optimizer's own step."""
        for param, grad in self._set_aside:
            param.grad = grad
        self._set_aside.clear()
        self._tell_factor()

    @torch.no_grad()
    def _update(
        self, param: nn.Parameter, state: dict[str, Any], group: dict[str, Any], exchange: Exchange
    ) -> None:
        scale = getattr(self._optimizer, "grad_scale", None)  # fused ones unscale by themselves
        overflow = getattr(self._optimizer, "found_inf", None)
        if overflow is not None and overflow.item():
            return
        learning_rate, decay = float(group["lr"]), group["weight_decay"]
        assert param.grad is not None
        came = param.grad if scale is None else param.grad / scale
        pull: Tensor | float = 0.0
        if group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW)):
            param.mul_(1.0 - learning_rate * decay)
        elif decay:
            pull = decay * param
        if exchange.sends_momentum:
            momentum = state["exp_avg"].copy_(came) + pull
        else:
            gain = 1.0 - float(group["betas"][0])
            momentum = state["exp_avg"].lerp_((came + pull).to(state["exp_avg"]), gain)
        variance = state["exp_avg_sq"] / (1.0 - group["betas"][1] ** float(state["step"]))
        # One scale for many signs is far too much for a value whose gradients are small. Adam's
        # own steps are hardly ever greater than the learning rate.
        limit = exchange.update_limit
        if exchange.fills_variance:
            variance = _filled(variance, momentum)
        update = (momentum / (variance.sqrt() + group["eps"])).clamp_(-limit, limit)
        update.masked_fill_(variance == 0.0, 0.0)  # signs are sent of what has no gradient, too
        param.add_(update, alpha=-learning_rate)

    def _tell_factor(self) -> None:
        """Tell each exchange the factor of its next update, which schedulers may have changed."""
        for group in self._optimizer.param_groups if self._compresses else ():
            for param in group["params"]:
                exchange = self._engine.exchange_of(param)
                if exchange is not None and exchange.sends_momentum:
                    slot = self._engine.slot_of(param)
                    exchange.momentum_factors[slot] = float(group["betas"][0])


def _filled(variance: Tensor, momentum: Tensor) -> Tensor:
    """Give what had no gradient in the warm-up the mean of the others, or of what has come."""
    known = variance > 0.0
    mean = variance.sum() / known.sum()
    typical = torch.where(known.any(), mean, momentum.square().mean())
    return torch.where(known, variance, typical)


def _check_adam(optimizer: Optimizer, group: dict[str, Any], exchange: Exchange) -> None:
    if not isinstance(optimizer, (Adam, AdamW)) or group["amsgrad"] or group["maximize"]:
        how = "sends" if exchange.sends_momentum else "freezes the second moment beside"
        raise ConfigError(
            f"The compressor {how} Adam's momentum, which {type(optimizer).__name__} with "
            f"amsgrad={group.get('amsgrad')}, maximize={group.get('maximize')} cannot use; "
            f"expected torch's Adam or AdamW without these. Or make it with adam=False, as "
            f"compression=OneBit(adam=False): then gradients travel, and the optimizer's own step "
            f"takes them."
        )


def _check_no_momentum(optimizer: Optimizer, group: dict[str, Any]) -> None:
    own = group.get("momentum") or group.get("betas", (0.0,))[0]
    if own:
        raise ConfigError(
            f"The compressor sends momentum, and {type(optimizer).__name__} has a momentum of "
            f"{own} of its own, expected 0: it would count twice. Use SGD without momentum, or "
            f"TopK(momentum=0.0)."
        )


_KINDS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "ASGD", "RMSprop", "Rprop")
# What they cost the host: of 805 parameters in two groups that alternate 205 pieces took 15 ms, the
# parameters by themselves 12, and 5 pieces, in one group, 7.
_PARAMS_A_PIECE, _FEW_PIECES = 8, 16
_ELEMENTWISE = {getattr(torch.optim, name) for name in (*_KINDS, "Adagrad", "Adadelta")}


class FlatStep:
    """Lets an optimizer step on pieces, from `take` to `put_back`."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self._optimizer = optimizer
        self._buffers = [one for one in engine.gradients if one.flat.has_local_form]
        self._suits = type(optimizer) in _ELEMENTWISE and _has_shards_only(engine)
        self._known_lists: list[list[nn.Parameter]] = []  # by group, of which the pieces are
        self._pieces: list[Piece] = []
        self._stepping: list[Piece] = []
        self._own_lists: list[list[nn.Parameter]] = []  # by group, while these have pieces

    @torch.no_grad()
    def prepare(self) -> bool:
        """Prepare a step on pieces, once gradients are averaged; return whether it can be made."""
        if not self._suits or not self._are_few():
            return False
        if any(_needs_each(one, self._buffers) for one in self._optimizer.param_groups):
            return False
        if not all(_is_ready(one) or one.buffer.is_unused for one in self._buffers):
            return False
        self._stepping = [piece for piece in self._pieces if _is_ready(piece.gradients)]
        can_step = all(piece.join(self._optimizer.state) for piece in self._stepping)
        if not can_step:
            self._rest()
        return can_step

    def _are_few(self) -> bool:
        """Whether pieces cost less than their parameters do."""
        self._cut_anew()
        num_params = sum(len(piece.params) for piece in self._pieces)
        return len(self._pieces) <= max(_FEW_PIECES, num_params // _PARAMS_A_PIECE)

    def _cut_anew(self) -> None:
        """Make the pieces anew where the groups have other parameters than they are of."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        if len(lists) == len(self._known_lists) and all(map(_are_same, lists, self._known_lists)):
            return
        self._known_lists = [[*params] for params in lists]
        group_of = {param: number for number, own in enumerate(lists) for param in own}
        self._pieces = [piece for one in self._buffers for piece in _cut(one, group_of)]

    def take(self) -> None:
        """Give the groups pieces in place of their parameters, once `prepare` has said so."""
        for number, group in enumerate(self._optimizer.param_groups):
            self._own_lists.append(group["params"])
            group["params"] = [
                piece.lend(self._optimizer.state)
                for piece in self._stepping
                if piece.group == number
            ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the groups their parameters back, which have what the optimizer has made."""
        if not self._own_lists:
            return
        groups = self._optimizer.param_groups
        for group, params in zip(groups, self._own_lists, strict=False):  # all, unless interrupted
            group["params"] = params
        for piece in self._stepping:
            piece.take_back(self._optimizer.state)
        increment_version([*chain.from_iterable(piece.params for piece in self._stepping)])
        self._rest()

    def _rest(self) -> None:
        for piece in self._stepping:
            piece.rest()
        self._own_lists, self._stepping = [], []


def _has_shards_only(engine: DataParallelEngine) -> bool:
    """Whether the optimizer's parameters are shards on the device, cut evenly, and nothing else."""
    is_plain = engine.copier is None and not engine.exchanges and not engine.split.groups
    is_cut = all(one.flat.stage > 0 and not one.flat.is_owned for one in engine.gradients)
    return is_plain and is_cut and not engine.owners.of_parts and not _rounds_by_place(engine)


def _rounds_by_place(engine: DataParallelEngine) -> bool:
    """Whether a step's last bits matter, and depend on where an element lies.

    Of 16 bits, what vector instructions leave over at a tensor's end is rounded once more.
    """
    formats = {one.flat.master_dtype for one in engine.gradients}
    return engine.options.same_bits and any(map(is_narrow, formats))


def _is_ready(gradients: FlatGradients) -> bool:
    """Whether every parameter of a buffer has an average for the optimizer."""
    local, master = gradients.buffer.local, gradients.flat.master
    if local is None or not gradients.states.all_averaged:
        return False
    return local.dtype == master.dtype and local.shape == master.shape


def _needs_each(group: Mapping[str, Any], buffers: Sequence[FlatGradients]) -> bool:
    """Whether padding would not stay zero, 0 / (0 + eps), or steps are recorded in a graph."""
    formats = {one.flat.master_dtype for one in buffers}
    vanishes = any(not torch.tensor(group.get("eps", 1.0)).to(kind) for kind in formats)
    return vanishes or bool(group.get("differentiable"))


def _are_same(ones: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(ones) == len(others) and all(map(is_, ones, others))


def _cut(gradients: FlatGradients, group_of: Mapping[nn.Parameter, int]) -> Iterator["Piece"]:
    """Yield a piece for each run of shards whose parameters are in one group."""
    flat = gradients.flat
    slices = enumerate(flat.layout.shard_slices(flat.shard_index))
    here = [(index, part) for index, part in slices if part.numel]
    for number, run in groupby(here, lambda one: group_of.get(flat.params[one[0]])):
        if number is not None:
            yield Piece(gradients, number, dict(run))


_States = dict[Any, Any]  # by parameter its entries, as `optimizer.state`
_Columns = dict[str, list[Any]]  # by key the entries of the parameters


class Piece:
    """Shards of one buffer that lie together, as `param` in a step, and what is kept for them."""

    def __init__(
        self, gradients: FlatGradients, group: int, slices: Mapping[int, ShardSlice]
    ) -> None:
        self.gradients, self.group = gradients, group
        self.param: nn.Parameter | None = None
        self.params = [gradients.flat.params[index] for index in slices]
        start = min(one.shard_offset for one in slices.values())
        self._bounds = slice(start, max(one.shard_stop for one in slices.values()))
        self._parts = [
            slice(one.shard_offset - start, one.shard_stop - start) for one in slices.values()
        ]
        self._marks: list[int] = []  # of entries that lie in memories of the piece
        self._versions: dict[str, int] = {}  # of counts on a GPU, when they were equal
        self._memories: dict[str, Tensor] = {}  # during a step
        self._entries: dict[str, Tensor] = {}  # likewise

    @property
    def _size(self) -> int:
        return self._bounds.stop - self._bounds.start

    def join(self, states: _States) -> bool:
        """Let the parameters' entries lie in memories of the piece, for the step that begins.

        Return whether one entry can stand for all parameters'. Not where some have others, or of
        another kind, or counts that differ; on a GPU neither where others than pieces have counted
        on since, as a step is not to wait for what they have come to.
        """
        own = [states.get(param) or {} for param in self.params]
        if [*map(dict.keys, own)].count(own[0].keys()) < len(own):
            return False
        columns = {key: [one[key] for one in own] for key in own[0]}
        if not self._lie_together(columns):
            return False
        self._memories = {key: self._memory(values) for key, values in columns.items()}
        self._entries = {
            key: memory if columns[key][0].ndim else memory[0].clone()
            for key, memory in self._memories.items()
        }
        return all(self._are_equal(key, columns[key]) for key in self._counts)

    def _lie_together(self, columns: _Columns) -> bool:
        values = [*chain.from_iterable(columns.values())]
        if {*map(type, values)} - {Tensor}:
            return False
        if self._marks != _marks(values):
            self._marks, self._versions = [], {}
            if not all(map(self._are_alike, columns.values())) or self._overlap(values):
                return False
            for same in columns.values():
                self._gather(same)
            self._marks = _marks(values)
        return True

    def _are_alike(self, values: Sequence[Tensor]) -> bool:
        first = values[0]
        if any(one.dtype != first.dtype or one.device != first.device for one in values):
            return False
        if first.ndim == 0:
            return all(one.ndim == 0 for one in values)
        lengths = [(part.stop - part.start,) for part in self._parts]
        return [one.shape for one in values] == lengths and all(map(Tensor.is_contiguous, values))

    def _overlap(self, values: Sequence[Tensor]) -> bool:
        """Whether some entries are, or see, each other's memory, or the shards'."""
        spans = sorted(
            (one.data_ptr(), one.data_ptr() + one.nbytes)
            for one in (*values, self.gradients.flat.master[self._bounds])
        )
        return any(stop > start for (_, stop), (start, _) in pairwise(spans))

    def _gather(self, values: Sequence[Tensor]) -> None:
        """Let tensors show parts of one new memory, with their values; they stay who they are."""
        first = values[0]
        memory = first.new_zeros(self._size if first.ndim else len(values))
        for value, part in zip(values, self._parts_of(memory, first.ndim), strict=True):
            value.data = part.copy_(value)

    def _parts_of(self, memory: Tensor, ndim: int) -> list[Tensor]:
        """Return each parameter's part of a memory of elements (ndim 1) or of counts (0)."""
        places: Sequence[Any] = self._parts if ndim else range(len(self.params))
        return [memory[place] for place in places]

    def _memory(self, values: Sequence[Tensor]) -> Tensor:
        """Return the memory in which entries lie together, shape (E,), or (P,) of counts."""
        size = self._size if values[0].ndim else len(values)
        return values[0].as_strided((size,), (1,))

    @property
    def _counts(self) -> list[str]:
        return [key for key, entry in self._entries.items() if not entry.ndim]

    def _are_equal(self, key: str, values: Sequence[Tensor]) -> bool:
        counts = self._memories[key]
        if counts.device.type != "cpu" and key in self._versions:
            return self._versions[key] == sum(map(VERSION, values))
        first, *others = counts.tolist()
        return others.count(first) == len(others)

    def lend(self, states: _States) -> nn.Parameter:
        """Return the piece for the optimizer to step on, which finds its gradient and entries."""
        local = self.gradients.buffer.local
        assert local is not None
        flat = self.gradients.flat
        shard = flat.master if flat.common is None else flat.common.part
        self.param = nn.Parameter(shard[self._bounds], requires_grad=False)
        self.param.grad = local[self._bounds]
        if self._entries:
            states[self.param] = {**self._entries}
        return self.param

    def take_back(self, states: _States) -> None:
        """Show the parameters what the optimizer has made of the entries."""
        left = states.pop(self.param, {})
        own = [states[param] for param in self.params] if left else []
        for key, value in left.items():
            memory = self._memories.get(key)
            if memory is None:
                self._show(key, value, own)
            elif value is not memory:
                memory.copy_(value)  # one count into all
        self._note(own, left)

    def rest(self) -> None:
        """Hold nothing any more."""
        self.param, self._memories, self._entries = None, {}, {}

    def _show(self, key: str, value: Any, own: Sequence[dict[str, Any]]) -> None:
        """Let the parameters have their parts of a new entry."""
        parts: Sequence[Any] = [value] * len(own)
        if isinstance(value, Tensor) and value.shape == (self._size,):
            parts = self._parts_of(value, 1)
        elif isinstance(value, Tensor) and value.ndim == 0:
            parts = self._parts_of(value.repeat(len(own)), 0)
        for entries, part in zip(own, parts, strict=True):
            entries[key] = part

    def _note(self, own: Sequence[dict[str, Any]], left: Mapping[str, Any]) -> None:
        """Note where new entries lie and, on a GPU, the versions of counts."""
        if not all(isinstance(value, Tensor) for value in left.values()):
            return
        if left.keys() != self._memories.keys():
            self._marks = _marks([entries[key] for key in left for entries in own])
        for key, value in left.items():
            if value.ndim == 0 and value.device.type != "cpu":
                self._versions[key] = sum(VERSION(entries[key]) for entries in own)


def _marks(values: Sequence[Tensor]) -> list[int]:
    """Return what tells tensors, and where they lie, from others."""
    return [*map(id, values), *addresses_of(values)]
