"""Local SGD on one rank: when fragments of parameters are sent, and how their mean is taken over.

    rank 0   step step step ┐            step step step ┐
    rank 1   step step step ┴─ meet ───> step step step ┴─ meet ───> ...

    begin   a fragment of the parameters (or of what they have changed) starts to travel
    land    the ranks' mean has come: common values are made of it, and each rank takes them over,
            or mixes them with its own if it has trained on meanwhile

The **consensus** is what all ranks agree on at any moment: the mean of their parameters, or with an
outer optimizer the parameters that it keeps. Validation and checkpoints see it; training goes on
from where each rank was. What user code sets is no outer gradient: what it sets between two steps
is averaged as it is, and what it sets in a validation all ranks go on from. Alone, buffers (running
statistics) are each rank's own, too.

Source: local SGD, arXiv:1805.09767; post-local SGD, arXiv:1808.07217; DiLoCo, arXiv:2311.08105;
streaming DiLoCo, arXiv:2501.18512.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.core.comparing import is_close
from lightning_shard.core.layout import build_layout
from lightning_shard.data_parallel.compression import Codec, Compressor, Exchange, FlatBuffer, Tally
from lightning_shard.data_parallel.compression.compressor import State
from lightning_shard.data_parallel.compression.state import (
    ReadWhenAsked,
    load_state,
    own_state,
    shared_by_all,
)
from lightning_shard.data_parallel.content import content, differ
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.reducer import Reducer
from lightning_shard.data_parallel.gradients.usage import UsageAgreement
from lightning_shard.data_parallel.local_sgd.rules import (
    SyncRule,
    SyncSchedule,
    averaged_state,
    mean_over_ranks,
    pack,
    unpack,
)
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.errors import ConfigError


class LocalEngine(DataParallelEngine):
    """An engine of stage 0 whose gradients are averaged over changing groups of ranks."""

    def reduce_over(self, groups: DataGroups, *, alone: bool) -> None:
        """Average over other ranks, or this one alone, from now on; between optimizer steps."""
        if alone:
            self.buffers.end()  # as the next step together would
        for gradients in self.gradients:
            gradients.reduce_over(groups)
        usage = UsageAgreement(self.gradients, groups.dp, self.device)
        self.reducer = Reducer(self.gradients, groups.dp, usage, self.phases)
        users = self.absent, self.edits
        self.view = OptimizerView(self.gradients, self.reducer, None, self.phases, *users)
        self.is_alone = alone


def cut_into_fragments(numels: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    """Assign each parameter, whose number of elements is given, to a fragment.

        parameters   a b c d e f g h      2 fragments   a b c | d e f g h

    A fragment is a run of full parameters: an outer optimizer and a compressor see their shapes,
    and sizes come out more even than with whole blocks, of which streaming DiLoCo
    (arXiv:2501.18512) makes its fragments.
    """
    if num_fragments > len(numels):
        raise ConfigError(
            f"fragments={num_fragments}, but the model has {len(numels)} parameters to cut into "
            f"fragments, expected at least one for each. Use fewer fragments."
        )
    names, total, last = list(numels), max(sum(numels.values()), 1), num_fragments - 1
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    before, current = 0, 0
    for place, name in enumerate(names):
        middle = (before + numels[name] / 2) / total
        # at most one further, and in time for the last parameters to fill the last fragments
        wanted = min(int(middle * num_fragments), current + bool(fragments[current]), last)
        current = max(current, wanted, num_fragments - (len(names) - place))
        fragments[current].append(name)
        before += numels[name]
    return fragments


Arrival = Pending | Exchange  # an average that is on its way


class Sender:
    """Averages buffers over the ranks, several at a time; each rank must call in the same order."""

    def __init__(
        self,
        collectives: Collectives,
        fragments: Sequence[Mapping[str, Tensor]],
        compressor: Compressor | None,
    ) -> None:
        self._collectives = collectives
        self._compressor = compressor
        self._exchanges: list[Exchange] = []
        for number, tensors in enumerate(fragments) if compressor is not None else ():
            assert compressor is not None
            layout = build_layout(
                [(n, tuple(one.shape)) for n, one in tensors.items()], num_shards=1
            )
            device = next(iter(tensors.values())).device
            check_real(tensors, collectives.rank)
            buffer = FlatBuffer(layout=layout, ranks=collectives, number=number, device=device)
            self._exchanges.append(compressor.exchange(buffer))

    @property
    def compresses(self) -> bool:
        """Whether fragments are compressed; a fragment must then be sent as a whole."""
        return bool(self._exchanges)

    def send(self, buffer: Tensor, fragment: int | None = None) -> Arrival:
        """Start to average a buffer, shape (n,), in place.

        Values of no fragment are not compressed.
        """
        exchange = self._exchanges[fragment] if self.compresses and fragment is not None else None
        if exchange is None or exchange.passes(buffer):
            return self._collectives.all_reduce(buffer, "avg", async_op=True)
        exchange.begin(buffer, buffer)
        return exchange

    def tally(self) -> Tally:
        """Return the bytes that this rank has sent compressed, and would have sent dense."""
        return sum((exchange.tally for exchange in self._exchanges), Tally())

    def state(self) -> dict[str, Any]:
        """Return what of the compression's state all ranks share; nothing may be on its way."""
        if self._compressor is None:
            return {}
        return shared_by_all(self._compressor, self._exchanges)

    def own_state(self) -> State:
        """Return what compression keeps on this rank; nothing may be on its way."""
        return own_state(self._exchanges)

    def load(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Take over what `state` returned for any fragments and any number of ranks.

        `own` is what `own_state` returned on this rank of as many; None to go on from averages.
        """
        if self._compressor is not None:
            load_state(self._compressor, self._exchanges, state, own)


def on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the values on the CPU."""
    return {name: value.detach().to("cpu", copy=True) for name, value in values.items()}


def check_real(tensors: Mapping[str, Tensor], rank: int) -> None:
    """Raise ConfigError for complex numbers, which no compressor takes."""
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise ConfigError(
                f"Rank {rank}: the parameter {name!r} is of {tensor.dtype}, but compression is for "
                f"real numbers only. Leave compression out, or keep real and imaginary parts in a "
                f"parameter of their own (torch.view_as_real)."
            )


def check_compressor(compressor: Compressor | None) -> None:
    """Raise ConfigError for a compressor that counts on a momentum: the outer optimizer has one."""
    keeps_momentum = isinstance(compressor, Codec) and compressor.momentum
    if compressor is not None and (keeps_momentum or compressor.freezes_variance):
        raise ConfigError(
            f"{type(compressor).__name__} keeps a momentum, or Adam's, of the gradients of every "
            f"step, but under local SGD what travels is the change of many steps, and the outer "
            f"optimizer has a momentum. Pass TopK(momentum=0.0), OneBit(adam=False) or "
            f"PowerSGD(adam=False)."
        )


@dataclass
class PendingSync:
    """Parameters whose mean is on its way."""

    names: list[str]
    landing: list[str]
    due: int
    buffer: Tensor
    arrival: Arrival | None


class LocalParameters:
    """This rank's parameters, to be read and overwritten between two steps."""

    def __init__(self, engine: DataParallelEngine, *, watches: bool = False) -> None:
        self._flats = [gradients.flat for gradients in engine.gradients]
        self._views: dict[str, Tensor] = {}
        self._lists: list[list[Tensor]] = []  # what the views are of
        self._collectives = engine.collectives
        self._watches = watches
        self._moved: dict[str, Tensor | bool] = {}  # whether user code has edited it here
        self.know()

    @property
    def views(self) -> dict[str, Tensor]:
        """Views of parameters that can have a gradient; they move when `.data` is assigned."""
        lists = [flat.local_views for flat in self._flats]
        if len(lists) != len(self._lists) or any(map(is_not, lists, self._lists)):
            self._lists = lists
            self._views = {
                name: view
                for flat, views in zip(self._flats, lists, strict=True)
                for name, view in zip(_names(flat), views, strict=True)
            }
        return self._views

    def trained(self) -> set[str]:
        """Return the names of trained parameters, and of those that share a buffer with them."""
        return {name for flat in self._flats if flat.is_trained for name in _names(flat)}

    def _watched(self) -> list[FlatParameters]:
        return [flat for flat in self._flats if self._watches or not flat.is_trained]

    def contents(self, flats: Iterable[FlatParameters] | None = None) -> dict[str, Tensor]:
        """Return by name a number that changes when the module's values do, of given buffers."""
        numbers: dict[str, Tensor] = {}
        for flat in self._flats if flats is None else flats:
            flat.take_in_edits()
            numbers.update(zip(_names(flat), map(content, flat.full_views), strict=True))
        return numbers

    def know(self) -> None:
        """Note that the values are those of a step, or of an exchange, and nobody's edits."""
        self._known = self.contents(self._watched())

    def look(self) -> None:
        """Note what user code has edited on this rank since `know`."""
        before, self._known = self._known, self.contents(self._watched())
        for name, now in self._known.items():
            self._moved[name] = (now != before.get(name)) | self._moved.get(name, False)

    def edited(self) -> set[str]:
        """Return the names of parameters that any rank's user code has edited since it was asked.

        Of frozen ones (a teacher's), and of all if they are watched. Each rank must call; the
        answer is the same on all.
        """
        if not self._watched():
            return set()
        self.look()
        moved, self._moved = self._moved, {}
        none = torch.zeros((), dtype=torch.bool, device=self._flats[0].full.device)
        flags = torch.stack([torch.as_tensor(moved.get(name, none)) for name in self.views]).byte()
        self._collectives.all_reduce(flags, "max").wait()
        found = zip(self.views, flags.tolist(), strict=True)
        return {name for name, has_moved in found if has_moved}

    def set_since(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of what user code has set on all ranks alike; each rank must call."""
        names, numbers = [*known], torch.stack([*self.contents().values()])
        moved = numbers != torch.stack([*known.values()])
        apart = differ(torch.where(moved, numbers, 0), self._collectives).tolist()
        if any(apart):
            raise ConfigError(
                f"Rank {self._collectives.rank}: hooks of a validation have left the ranks with "
                f"different values of {names[apart.index(True)]!r}, expected the same on all, "
                f"which hold what they agree on for as long. Change parameters on every rank "
                f"alike, or after self.trainer.strategy.broadcast(value)."
            )
        return self.copies(
            name for name, is_set in zip(names, moved.tolist(), strict=True) if is_set
        )

    def settle(self) -> None:
        """Take in what user code has changed in the module's parameters, before reading."""
        for flat in self._flats:
            flat.take_in_edits()

    def set_back(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters to these values that have come back to them but for rounding."""
        self.settle()
        self.set({n: one for n, one in values.items() if is_close(self.views[n], one, 1e-5)})

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor], *, keep: float = 0.0) -> None:
        """Overwrite parameters, here and in the module; a share of the old values stays."""
        for flat in self._flats:
            flat.see_assigned()  # else it would come back over these values
        for name, value in values.items():
            view = self.views[name]
            view.copy_(value.lerp(view.to(value.dtype), keep) if keep else value)
        for flat in self._flats:
            flat.begin_unshard()  # carries the optimizer's format over; nothing is sent
        self.know()

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of the named parameters' values."""
        return {name: self.views[name].clone() for name in names}

    def mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average values over the ranks; each rank must call with the same names."""
        means = mean_over_ranks(list(values.values()), self._collectives)
        return dict(zip(values, means, strict=True))


def _names(flat: FlatParameters) -> list[str]:
    return [slot.name for slot in flat.layout.slots]


class LocalSGD:
    """Local training from the moment that this is made until `finish`.

    Args:
        engine: An engine of stage 0, which is alone now; every rank has the same parameters.
        make_rule: Makes the rule from the parameters that are trained.
        collectives: Group of the ranks that meet, whose operations may stay in flight.
        step: Number of steps of the run so far. Each rank must construct this at the same step.
        compressor: Compresses the fragments; the rule must then send changes. None for none.
        watches: Whether user code may set parameters between two steps.
    """

    def __init__(
        self,
        engine: LocalEngine,
        schedule: SyncSchedule,
        make_rule: Callable[[Mapping[str, Tensor]], SyncRule],
        collectives: Collectives,
        step: int,
        compressor: Compressor | None = None,
        *,
        watches: bool = False,
    ) -> None:
        self._engine = engine
        self._schedule = schedule
        self._collectives = collectives
        self._watches = watches
        self._own = LocalParameters(engine, watches=watches)
        trained = self._own.trained()
        views = {name: view for name, view in self._own.views.items() if name in trained}
        numels = {name: view.numel() for name, view in views.items()}
        self._fragments = cut_into_fragments(numels, schedule.fragments)
        self.rule = make_rule(views)
        parts = [{name: views[name] for name in names} for names in self._fragments]
        self._sender = Sender(collectives, parts, compressor)
        self.step = step
        self._stale: set[str] = set()  # changed here since they were last sent
        self._edited: set[str] = set()  # of those what user code has set on some rank
        self._flights: list[PendingSync] = []
        self._kept: dict[str, Tensor] | None = None  # own values, while the module has others
        self._kept_buffers: list[Tensor] = []  # the same of buffers that have been averaged
        self._shown: dict[str, Tensor] = {}  # what the module held when a method moved it
        engine.around_methods = self._around_methods

    def watch(self, *, has_stepped: bool) -> None:
        """After a step, take the values for its own; else note what user code has set since."""
        if self._watches:
            self._own.know() if has_stepped else self._own.look()

    def _take_in_edits(self) -> None:
        """Agree on what user code has set; each rank must call."""
        edited = self._own.edited()
        self._stale |= edited
        self._edited |= edited & (self._own.trained() | self.rule.common.keys())

    def after_step(self) -> None:
        """Note an optimizer step, and exchange what it is time for; each rank must call."""
        self.step += 1
        self._stale |= self._own.trained()
        self._land(self.step)
        beginning = self._schedule.beginning(self.step)
        if beginning:
            self._take_in_edits()
        for index in beginning:
            self._begin(index, self.step + self._schedule.overlap_steps)
        self._land(self.step)
        self._proceed()
        if self._schedule.ends_round(self.step):
            self._average_buffers()

    def _begin(self, fragment: int, due: int) -> None:
        """Send a fragment's changed parameters; with the last, those in none (once frozen), too."""
        self._own.settle()
        names = self._fragments[fragment]
        if edited := [name for name in names if name in self._edited]:
            self._meet_at_once(edited)
        if landing := [name for name in names if name in self._stale]:
            self._send(names if self._sender.compresses else landing, landing, due, fragment)
        if fragment == len(self._fragments) - 1:
            known = {name for names in self._fragments for name in names}
            others = [n for n in self._own.views if n in self._stale and n not in known]
            if others := self._meet_newcomers(others):
                self._send(others, others, due)

    def _send(
        self, names: list[str], landing: list[str], due: int, fragment: int | None = None
    ) -> None:
        self._stale.difference_update(landing)
        buffer = pack(self.rule.outgoing({name: self._own.views[name] for name in names}))
        arrival = self._sender.send(buffer, fragment)
        self._flights.append(PendingSync(names, landing, due, buffer, arrival))

    def _meet_newcomers(self, names: list[str]) -> list[str]:
        """Average parameters that are new to the rule at once; return the others' names."""
        self._stale.difference_update(names)
        new = [name for name in names if self.rule.common and name not in self.rule.common]
        self._meet_at_once(new)
        return [name for name in names if name not in new]

    def _meet_at_once(self, names: Collection[str]) -> None:
        mean = self._own.mean({name: self._own.views[name] for name in names})
        self._own.set(mean)
        self._go_on_from(mean)

    def _go_on_from(self, values: Mapping[str, Tensor]) -> None:
        """Take values that all ranks have for the common ones."""
        self._stale.difference_update(values)
        self._edited.difference_update(values)
        followed = self._own.trained() | self.rule.common.keys()
        self.rule.adopt({name: value for name, value in values.items() if name in followed})

    def _land(self, step: int) -> None:
        due = [flight for flight in self._flights if flight.due <= step]
        self._flights = [flight for flight in self._flights if flight.due > step]
        if due and self._schedule.overlap_steps:
            self._take_in_edits()  # which what was sent before them must not undo
        for flight in due:
            common = self.rule.arrived(self._arrived(flight))
            self._own.settle()
            taken = {name: one for name, one in common.items() if name not in self._edited}
            self._own.set(taken, keep=self._schedule.kept_share)
            self._stale.difference_update(taken)
            if self._schedule.kept_share:
                self._stale.update(flight.landing)

    def _proceed(self) -> None:
        """Start the second half of compressed exchanges whose time is half over."""
        for flight in self._flights:
            steps_left = flight.due - self.step
            if (
                isinstance(flight.arrival, Exchange)
                and 2 * steps_left <= self._schedule.overlap_steps
            ):
                flight.arrival.proceed()

    def _arrived(self, flight: PendingSync) -> dict[str, Tensor]:
        """Return the mean of a pending sync, after waiting for it."""
        if flight.arrival is not None:
            flight.arrival.wait()
            flight.arrival = None
        shapes = [self._own.views[name] for name in flight.names]
        mean = dict(zip(flight.names, unpack(flight.buffer, shapes), strict=True))
        return {name: mean[name] for name in flight.landing}

    @torch.no_grad()
    def _average_buffers(self) -> None:
        if not self._engine.buffers_moved:
            return
        buffers = self._engine.buffers.changing()
        means = mean_over_ranks(buffers, self._collectives)
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean)
        self._engine.buffers_moved = False

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Let the module hold the consensus inside, and its own values after; collective."""
        if self._kept is not None:
            yield
            return
        self._own.settle()
        self._take_in_edits()
        differing = self._differing()
        kept, edits = self._own.copies(differing), dict[str, Tensor]()
        self._own.set(self._consensus_of(differing))
        known = self._own.contents()
        self._kept = kept
        with self._averaged_buffers():
            try:
                yield
                self._own.set_back(self._shown)
                edits = self._own.set_since(known)
            finally:
                self._kept, self._shown = None, {}
                self._own.set(kept | edits)
        self._go_on_from(edits)
        for flight in self._flights if edits else ():
            flight.landing = [name for name in flight.landing if name not in edits]

    @contextmanager
    def _around_methods(self, optimizer: Optimizer) -> Iterator[None]:
        """Let an optimizer have the ranks' mean state for a method that runs on the consensus."""
        if self._kept is None:
            yield
            return
        self._shown = self._shown or self._own.copies(self._own.views)
        with averaged_state(optimizer, self._collectives):
            yield

    @contextmanager
    def _averaged_buffers(self) -> Iterator[None]:
        """Let buffers be averages inside, and restore them after, unless user code set them."""
        moved = self._engine.buffers_moved
        buffers = self._engine.buffers.changing() if moved else []
        own = [buffer.clone() for buffer in buffers]
        self._average_buffers()
        averages = [buffer.clone() for buffer in buffers]
        self._kept_buffers = own
        try:
            yield
        finally:
            self._kept_buffers = []
            self._engine.buffers_moved = moved
            for buffer, value, average in zip(buffers, own, averages, strict=True):
                if torch.allclose(buffer, average, rtol=0, atol=0, equal_nan=True):
                    buffer.data.copy_(value)

    def _differing(self) -> list[str]:
        """Return the names of parameters that may differ from the consensus, in a common order."""
        known = self._moved() | self.rule.common.keys()
        return [name for name in self._own.views if name in known]

    def _moved(self) -> set[str]:
        """Return the names of parameters that may differ between ranks."""
        return self._stale.union(*(flight.landing for flight in self._flights))

    def _consensus_of(self, names: Collection[str]) -> dict[str, Tensor]:
        known = self.rule.common.keys() - self._edited
        common = {name: self.rule.common[name] for name in names if name in known}
        others = {name: self._own.views[name] for name in names if name not in common}
        return common | self._own.mean(others)

    def finish(self) -> None:
        """End with a last, perhaps shorter round; all ranks hold the consensus afterwards."""
        self._land(self.step + self._schedule.overlap_steps)
        self._take_in_edits()
        for index in range(len(self._fragments)):
            self._begin(index, self.step)
        self._land(self.step)
        self._own.set(self._consensus_of(self._differing()))
        self._average_buffers()

    def held(self) -> list[Tensor]:
        """Return the tensors that local SGD holds on this rank besides the engine's."""
        return [*self.rule.tensors(), *(flight.buffer for flight in self._flights)]

    def compression_tally(self) -> Tally:
        """Return the bytes that this rank has sent compressed, and would have sent dense."""
        return self._sender.tally()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint of the consensus lacks; each rank must call.

        Returns:
            On rank 0 the means on their way, and the rule's state, by parameter name, on the CPU;
            {} on the other ranks. What each rank keeps besides is its `own_state`.
        """
        if self._kept is None:
            self._own.settle()
        arrived = [(flight.due, self._arrived(flight)) for flight in self._flights]
        if not self._engine.is_first:
            return {}
        return {
            "own": {},  # in older checkpoints the mean of the ranks' own parameters
            "stale": [name for name in self._own.views if name in self._stale],
            "edited": [name for name in self._own.views if name in self._edited],
            "sends": self.rule.sends,
            "arriving": [{"due": due, "mean": on_cpu(one)} for due, one in arrived],
            "common": on_cpu(self._wide()),
            "outer": self.rule.state(),
            "compression": self._sender.state(),
        }

    def own_state(self) -> dict[str, Any]:
        """Return what this rank alone has, as views, right after `state_dict`; no communication.

        It is parameters and buffers that may differ between ranks, and what compression keeps.
        """
        own = self._own.views if self._kept is None else self._kept
        moved, buffers = self._moved(), list[Tensor]()
        if self._engine.buffers_moved or self._kept_buffers:
            buffers = self._kept_buffers or self._engine.buffers.changing()
        return {
            "parameters": {name: value for name, value in own.items() if name in moved},
            "buffers": buffers,
            "compression": self._sender.own_state(),
        }

    def _wide(self) -> dict[str, Tensor]:
        """Return common values that are in a wider format than the module's."""
        common = self.rule.common.items()
        return {name: one for name, one in common if one.dtype != self._own.views[name].dtype}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any], kept: Mapping[str, Any] | None = None
    ) -> None:
        """Go on from what `state_dict` gave on any number of ranks; no communication.

        `kept` is what `own_state` returned on this rank of as many; None to go on from the mean.
        """
        means, mine = state["own"], kept["parameters"] if kept else {}
        names = list({**dict.fromkeys(means), **dict.fromkeys(mine)})
        own = ReadWhenAsked(
            [name for name in names if name in self._own.views],
            lambda name: mine[name] if name in mine else means[name],
        )
        self._own.set(own)
        self._stale.update(own if not kept else own.keys() & set(state["stale"]))
        self._edited.update(self._own.views.keys() & set(state.get("edited", ())))
        self._load_buffers(kept["buffers"] if kept else [])
        for name, value in state["common"].items():
            if name in self.rule.common:
                self.rule.common[name].copy_(value)
        self.rule.load(state["outer"])
        self._sender.load(state["compression"], kept["compression"] if kept else None)
        for flight in self._understood(state):
            mean = {name: one for name, one in flight["mean"].items() if name in self._own.views}
            place = next(iter(self._own.views.values())).device
            if mean:
                buffer = pack([value.to(place) for value in mean.values()])
                self._flights.append(
                    PendingSync(list(mean), list(mean), flight["due"], buffer, None)
                )

    def _load_buffers(self, values: Sequence[Tensor]) -> None:
        buffers = self._engine.buffers.changing()
        if [one.shape for one in values] != [one.shape for one in buffers]:
            return
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        self._engine.buffers_moved = bool(values)

    def _understood(self, state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the means on their way, if this rule sends the same; another misreads them."""
        arriving: Sequence[Mapping[str, Any]] = state["arriving"]
        sent = state.get("sends")
        if not arriving or sent == self.rule.sends:
            return arriving
        rank_zero_warn(
            f"The checkpoint was saved while {sent or 'unknown values'} of parameters were on "
            f"their way between the ranks, but this run sends {self.rule.sends}; they are left "
            f"out. Training goes on from the parameters that the checkpoint holds. Resume with the "
            f"same outer_optimizer and compression, or save in a step in which nothing travels, "
            f"to lose nothing."
        )
        return []


def check_model(engine: LocalEngine, schedule: SyncSchedule, compressor: Compressor | None) -> None:
    """Raise ConfigError if training alone cannot begin with this model, or with more unfrozen."""
    own = LocalParameters(engine)
    numels = {name: view.numel() for name, view in own.views.items()}
    cut_into_fragments(numels, schedule.fragments)
    if compressor is not None:
        trained = own.trained()
        views = {name: view for name, view in own.views.items() if name in trained}
        check_real(views, engine.collectives.rank)
