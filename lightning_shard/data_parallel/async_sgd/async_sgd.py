"""Ranks that train by themselves, each a worker and the server of one shard.

    rank r, after the backward of step c
      1  send       each owner its part of the gradient
      2  apply      the own part, and what has come from peers, to the own shard
      3  push       the own shard to everybody
      4  take over  the newest shards that have come
      5  wait       while the oldest of them lies further back than the bound; serve meanwhile

An owner serves between its steps and while it waits, so parameters never change under a forward or
backward. What has come is applied in rounds, at most one gradient of each rank in an update: their
mean. One update per gradient would let a single rank's noise into Adam's second moment. Each counts
for 1 / N, or 1 / (k N) if it is k > 1 rounds of N gradients older than the shard.

Source: stale synchronous parallel, Ho et al., NeurIPS 2013; staleness-aware learning rates, Zhang
et al., arXiv:1511.05950.

The engine of ZeRO stage 1 with a switch: average gradients, or leave each rank its own.

    together    backward ──reduce-scatter──> a shard of the average     as stage 1
    alone       backward ──────────────────> the rank's own, full       nothing is sent

Alone, clipping goes by the rank's own norm, and buffers are its own. The optimizer's state stays in
shards: the view that is put in decides when and by which gradient it is updated.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.streams import sent_up
from lightning_shard.core.states import State
from lightning_shard.data_parallel.async_sgd.mailbox import Mailbox
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.gradients.reducer import Reducer, always
from lightning_shard.data_parallel.gradients.usage import UsageAgreement
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_view import OptimizerView
from lightning_shard.data_parallel.phases import Phases
from lightning_shard.data_parallel.units.full_values import bring_together
from lightning_shard.errors import ConfigError


@dataclass(frozen=True)
class Update:
    """A step of the optimizer on this rank's shard."""

    grads: Sequence[Tensor | None]
    scale: float


class ShardOptimizerView(OptimizerView):
    """The view in which an optimizer takes steps by updates of its shard.

    Inside, each parameter shows the shard that this rank owns and `.grad` shows that shard's
    gradient. The learning rate is scaled for as long.
    """

    def __init__(
        self, reducer: Reducer, optimizer: Optimizer, own_update: Callable[[], Update]
    ) -> None:
        super().__init__([], reducer, None, Phases())
        self.flats: Sequence[FlatParameters] = ()
        self._optimizer, self._own_update = optimizer, own_update
        self._update: Update | None = None
        self._full_grads: list[Tensor | None] = []
        self._rates: list[float | Tensor] = []

    def apply(self, update: Update) -> None:
        """Let the optimizer take a step by peers' gradients."""
        self._update = update
        self._optimizer.step()

    def show_nothing_new(self) -> None:
        """Enter without a gradient, until `leave`."""
        self._update = Update([None for _ in self.params], 1.0)
        self.enter()

    @property
    def params(self) -> list[nn.Parameter]:
        """Every parameter that the updates change."""
        return [param for flat in self.flats for param in flat.params]

    @override
    def enter(self, shows: Callable[[], bool] = always) -> None:
        update, self._update = self._update or self._own_update(), None
        self._full_grads = [param.grad for param in self.params]
        self._show(None for _ in self.params)
        for flat in self.flats:
            flat.present_local()
        self._show(update.grads)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * update.scale

    @override
    def leave(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._show(None for _ in self.params)
        for flat in self.flats:
            flat.present_full()
        self._show(self._full_grads)
        self._full_grads = []

    def _show(self, grads: Iterable[Tensor | None]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad


class AsyncEngine(DataParallelEngine):
    """An engine whose ranks may train by themselves."""

    _together: tuple[OptimizerView, Reducer]  # those of ranks that are not alone

    def part(self, view: OptimizerView) -> None:
        """Leave each rank to itself from now on, and drop shards of averages; between two steps."""
        self._together, self.view, self.is_alone = (self.view, self.reducer), view, True
        usage = UsageAgreement(self.gradients, self.collectives, self.device)
        # This one is owed everything.
        self.reducer = Reducer(self.gradients, self.collectives, usage, self.phases)
        self._show_sums(True)
        self._drop_gradients()

    def rejoin(self) -> None:
        """Average gradients again."""
        (self.view, self.reducer), self.is_alone = self._together, False
        self._show_sums(False)
        self._drop_gradients()

    def _show_sums(self, shows: bool) -> None:
        """Let `.grad` be the rank's own gradient, or stand for the average."""
        for gradients in self.gradients:
            gradients.buffer.shows_sums = shows and not gradients.flat.has_master

    def _drop_gradients(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def share_buffers(self) -> None:
        """Take over rank 0's buffers if training alone may have changed them; each must call."""
        if self.buffers_moved:
            self.buffers.broadcast_changing()
        self.buffers_moved = False

    @override
    @contextmanager
    def optimizer_view(self) -> Iterator[None]:
        with nullcontext() if self.is_alone else super().optimizer_view():
            yield

    @override
    def average_gradients(self) -> None:
        if not self.is_alone:
            super().average_gradients()

    @property
    @override
    def steps_alone(self) -> bool:
        return self.is_alone and self.model.training and torch.is_grad_enabled()

    @override
    @contextmanager
    def backward(self, is_used: Callable[[], bool] = always) -> Iterator[None]:
        with self.no_sync() if self.is_alone else nullcontext(), super().backward(is_used):
            yield


_WORD = 8
_ALIGN = 16  # of the widest format


class Kind(IntEnum):
    """The kind of a message."""

    GRADIENT = auto()
    SHARD = auto()
    LAST = auto()


class Message:
    """One message, as views of its memory.

    Attributes:
        data: Shape (num_words,), int64, on the CPU.
        present: By parameter, over all buffers, whether it has a gradient; bytes.
    """

    def __init__(self, wire: "Wire", data: Tensor) -> None:
        self.data = data
        raw = data.view(torch.uint8)
        self._head = data[: 2 + wire.num_ranks]
        begin = _aligned(self._head.nbytes)
        self.present = raw[begin : begin + wire.num_params]
        self.shards = []
        begin += _aligned(wire.num_params)
        for flat in wire.flats:
            num_bytes = flat.shard.nbytes
            self.shards.append(raw[begin : begin + num_bytes].view(flat.shard.dtype))
            begin += _aligned(num_bytes)

    @property
    def kind(self) -> Kind:
        """The kind of the message."""
        return Kind(int(self.data[0]))

    @property
    def received(self) -> int:
        """Number of the receiver's messages that the sender had taken."""
        return int(self.data[1])

    @property
    def version(self) -> list[int]:
        """Version of the shard that the message is about."""
        version: list[int] = self._head[2:].tolist()
        return version

    def address(self, kind: Kind, received: int, version: Sequence[int]) -> None:
        """Fill in the head of the message."""
        self._head.copy_(torch.tensor([kind, received, *version]))


class Wire:
    """The layout of the shards of some buffers in a message.

        int64   kind | received | version of a shard, N | which parameters | one shard, all buffers

        GRADIENT   the sender's gradient of the receiver's shard, and the version of that shard
                   with which it was computed
        SHARD      the sender's own shard, and its version
        LAST       the same, and nothing comes after it: ranks have agreed

    All are of one size, so that a receive can be posted beforehand, and lie in CPU memory.
    `received` counts the messages of the receiver that the sender has taken, whose memory is free.
    """

    def __init__(self, flats: Sequence[FlatParameters], num_ranks: int) -> None:
        self.flats = flats
        self.num_ranks = num_ranks
        self.num_params = sum(len(flat.params) for flat in flats)
        sizes = [(2 + num_ranks) * _WORD, self.num_params, *(flat.shard.nbytes for flat in flats)]
        self.num_words = sum(map(_aligned, sizes)) // _WORD
        self._shard_slices = [
            [shard_slice for flat in flats for shard_slice in flat.layout.shard_slices(rank)]
            for rank in range(num_ranks)
        ]
        self._homes = [number for number, flat in enumerate(flats) for _ in flat.params]

    def new(self) -> Message:
        """Return a message without content."""
        return Message(self, torch.empty(self.num_words, dtype=torch.int64))

    @torch.no_grad()
    def gradient(self, grads: Sequence[Tensor | None], rank: int) -> Message:
        """Return a message with a rank's part of gradients, whose head is still to be filled."""
        message = self.new()
        flags = [int(grad is not None) for grad in grads]
        message.present.copy_(torch.tensor(flags, dtype=torch.uint8))
        parts = [
            shard if flat.full.device == shard.device else torch.empty_like(flat.shard)
            for shard, flat in zip(message.shards, self.flats, strict=True)
        ]
        for home, shard_slice, grad in zip(
            self._homes, self._shard_slices[rank], grads, strict=True
        ):
            if grad is not None and shard_slice.numel:
                part = grad.flatten()[shard_slice.param_offset : shard_slice.param_stop]
                parts[home][shard_slice.shard_offset : shard_slice.shard_stop].copy_(part)
        for shard, part in zip(message.shards, parts, strict=True):
            if part is not shard:
                shard.copy_(part)
        return message

    @torch.no_grad()
    def shard(self) -> Message:
        """Return a message with the own shard, whose head is still to be filled."""
        message = self.new()
        for target, flat in zip(message.shards, self.flats, strict=True):
            target.copy_(flat.shard)
        return message

    @torch.no_grad()
    def take_over(self, message: Message, rank: int) -> None:
        """Copy the shard in a message from its owner into the parameters held here."""
        for source, flat in zip(message.shards, self.flats, strict=True):
            flat.full[slice(*flat.layout.shard_bounds(rank))].copy_(source)

    def own_gradient(self, message: Message, rank: int) -> list[Tensor | None]:
        """Return the gradient in a message by parameter; None where it has no part here."""
        shards = [
            sent_up(shard, flat.full.device)
            for shard, flat in zip(message.shards, self.flats, strict=True)
        ]
        return [
            shards[home][shard_slice.shard_offset : shard_slice.shard_stop]
            if used and shard_slice.numel
            else None
            for home, shard_slice, used in zip(
                self._homes, self._shard_slices[rank], message.present.tolist(), strict=True
            )
        ]


def is_last(data: Tensor) -> bool:
    """Whether a message is the last of its sender."""
    return int(data[0]) == Kind.LAST


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


StalenessRule = Literal["inverse"]
MailboxType = Callable[[Collectives, int, Callable[[Tensor], bool]], Mailbox]


class Clocks:
    """One rank's knowledge of steps and versions: how many steps of each rank each shard includes.

    A rank at step c may start the next one while every shard that it holds includes the steps of
    all ranks up to c - bound:

                             steps of rank    0   1   2
        shard 0, own, the latest              5   4   2
        shard 1, as it last came from rank 1  4   5   1    <- oldest: a rank at step 5 is 4 ahead
        shard 2, as it last came from rank 2  5   4   3

    No rank waits for ever: none starts a step before every peer has a shard of it that includes as
    much as it needs itself (`lacks`). Source: Ho et al., NeurIPS 2013.
    """

    def __init__(self, rank: int, num_ranks: int, bound: int) -> None:
        self.step = 0
        self.included = [[0] * num_ranks for _ in range(num_ranks)]
        self.arrived = [0] * num_ranks
        self._rank, self._bound = rank, bound
        self._handed_over = [0] * num_ranks  # by peer, what its copy of the own shard includes

    @property
    def own(self) -> list[int]:
        """The version of this rank's own shard."""
        return self.included[self._rank]

    @property
    def staleness(self) -> int:
        """Number of steps that the oldest part of the parameters held here lies behind."""
        return self.step - min(map(min, self.included))

    @property
    def may_start(self) -> bool:
        """Whether this rank may start its next step."""
        return self.staleness <= self._bound

    def age(self, version: Sequence[int]) -> int:
        """Return the number of gradients that the own shard has taken since `version`."""
        return sum(self.own) - sum(version)

    def arrive(self, rank: int) -> None:
        """Note that the gradient of one more step of `rank` is here."""
        self.arrived[rank] += 1

    def apply(self, rank: int) -> None:
        """Note that the own shard now includes one more step of `rank`."""
        self.own[rank] += 1

    @property
    def must_apply(self) -> bool:
        """Whether this rank or a peer would go on if all that has arrived were applied."""
        oldest = min(self.arrived)
        peers = (
            known < arrived - self._bound <= oldest
            for rank, (known, arrived) in enumerate(
                zip(self._handed_over, self.arrived, strict=True)
            )
            if rank != self._rank
        )
        return min(self.own) < self.step - self._bound <= oldest or any(peers)

    def learn(self, shard: int, version: Sequence[int]) -> None:
        """Note the version of a shard that has arrived."""
        self.included[shard] = list(version)

    def hand_over(self, peer: int) -> None:
        """Note that the own shard, as it is now, is on its way to `peer`."""
        self._handed_over[peer] = min(self.own)

    def waits(self, peer: int) -> bool:
        """Whether `peer` may wait for the own shard, and would go on if it had it."""
        needed = self.arrived[peer] - self._bound
        return self._handed_over[peer] < needed <= min(self.own)

    def lacks(self, peer: int) -> bool:
        """Whether `peer` has less of the own shard than this rank needs to start a step."""
        return self._handed_over[peer] < self.step - self._bound


@dataclass(frozen=True)
class Arrived:
    """A gradient of this rank's shard that has arrived."""

    rank: int
    grads: Sequence[Tensor | None]
    version: Sequence[int]
    counts: bool


@dataclass
class AsyncCounters:
    """Counters of what this rank has done since training began.

    Attributes:
        gradients: Number of gradients applied to its shard, its own and its peers'.
        updates: Number of optimizer steps that applied them.
        waits: Number of steps before which it had to wait for a peer.
        max_staleness: Most steps that the oldest part of the parameters lay behind in a step.
        total_staleness: Sum of the steps that the oldest part lay behind, over all steps.
        pushes: Number of shards sent.
    """

    steps: int = 0
    gradients: int = 0
    updates: int = 0
    waits: int = 0
    max_staleness: int = 0
    total_staleness: int = 0
    pushes: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean number of steps that the oldest part of the parameters lay behind."""
        return self.total_staleness / max(1, self.steps)


class WorkerStep(State):
    """Where this rank's step is."""

    COUNTED = "PREPARED"  # the last one
    PREPARED = "SENT COUNTED"
    SENT = "PREPARED COUNTED"


class AsyncSGD:
    """Asynchronous SGD on one rank, which is a worker and the server of its shard.

    Args:
        ranks: Group of all ranks, in which nothing else is sent.
        bound: Number of steps that a rank may be ahead; 1 or more.
        rule: "inverse" shrinks the learning rate of old gradients; None does not.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        optimizer: Optimizer,
        ranks: Collectives,
        mailbox_type: MailboxType,
        bound: int,
        rule: StalenessRule | None,
    ) -> None:
        check_learning_rates(optimizer)
        self.counters = AsyncCounters()
        self._engine, self._ranks, self._rule = engine, ranks, rule
        self._make_mailbox = mailbox_type
        self._bound = bound
        self._wire = Wire([], ranks.size)
        self._view = ShardOptimizerView(engine.reducer, optimizer, self._own_update)
        self._clocks = Clocks(ranks.rank, ranks.size, bound)
        self._mailbox: Mailbox | None = None
        self._waiting: list[Arrived] = []  # to be applied, in the order of arrival
        self._newest: dict[int, Message] = {}
        self._last: set[int] = set()  # peers whose last message has come
        self._step = WorkerStep.COUNTED
        engine.part(self._view)
        engine.around_methods = self._around_methods

    # --- the steps ------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Prepare the optimizer's step, which sends gradients and applies this rank's own part."""
        if self._mailbox is None:
            flats = [one.flat for one in self._engine.gradients if one.is_trained]
            self._wire = Wire(flats, self._ranks.size)
            self._view.flats = flats
            self._clocks = Clocks(self._ranks.rank, self._ranks.size, self._bound)
            self._last.clear()
            self._mailbox = self._make_mailbox(self._ranks, self._wire.num_words, is_last)
        self._check_frozen()
        self._step = self._step.to(WorkerStep.PREPARED)

    def _check_frozen(self) -> None:
        """Raise if a parameter that was frozen when ranks agreed is trained: it is not sent."""
        for gradients in self._engine.gradients:
            if gradients.is_trained and gradients.flat not in self._wire.flats:
                raise ConfigError(
                    f"Rank {self._ranks.rank}: {gradients.flat.layout.slots[0].name!r} was "
                    f"unfrozen between two steps, expected it at the start of an epoch, where "
                    f"ranks agree. Unfreeze in on_train_epoch_start, as BaseFinetuning does."
                )

    def _own_update(self) -> Update:
        """Send the gradient of a step, and return the update by this rank's own part of it."""
        if self._step is not WorkerStep.PREPARED:
            raise ConfigError(
                f"Rank {self._ranks.rank}: a step of the optimizer went past the Trainer, expected "
                f"steps that asynchronous SGD can count. Take the optimizer from "
                f"self.optimizers() without use_pl_optimizer=False."
            )
        self._step = self._step.to(WorkerStep.SENT)
        self._observe()
        return self._sent([param.grad for param in self._view.params])

    def _sent(self, grads: Sequence[Tensor | None]) -> Update:
        """Send a step's gradient, by parameter, and return the update by the own part of it."""
        assert self._mailbox is not None
        clocks, rank = self._clocks, self._ranks.rank
        for peer in self._peers:
            message = self._wire.gradient(grads, peer)
            self._send(peer, message, Kind.GRADIENT, clocks.included[peer])
        own = self._wire.own_gradient(self._wire.gradient(grads, rank), rank)
        self._clocks.arrive(rank)
        counts = any(grad is not None for grad in grads)
        self._waiting.insert(0, Arrived(rank, own, tuple(clocks.own), counts))
        self._take_in(self._mailbox.poll())
        return self._next_round()

    @property
    def _peers(self) -> list[int]:
        assert self._mailbox is not None
        return self._mailbox.peers

    def _observe(self) -> None:
        """Count a step, and the age of the parameters that it has used."""
        staleness = self._clocks.staleness
        assert staleness <= self._bound, f"staleness {staleness} above the bound {self._bound}"
        self.counters.max_staleness = max(self.counters.max_staleness, staleness)
        self.counters.total_staleness += staleness
        self.counters.steps += 1

    def _next_round(self) -> Update:
        """Return the update by the first gradient of each rank that waits, and count it."""
        firsts: dict[int, Arrived] = {}
        for one in self._waiting:
            firsts.setdefault(one.rank, one)
        taken = list(firsts.values())
        self._waiting = [one for one in self._waiting if one is not firsts[one.rank]]
        weights = [self._weight(one.version) * one.counts for one in taken]
        for one in taken:
            self._clocks.apply(one.rank)
        self.counters.gradients += len(taken)
        self.counters.updates += 1
        return Update(mean([one.grads for one in taken], weights), sum(weights))

    def _weight(self, version: Sequence[int]) -> float:
        size = self._ranks.size
        rounds = self._clocks.age(version) // size
        return 1 / (size * max(1, rounds if self._rule == "inverse" else 1))

    def _apply(self) -> None:
        """Apply all gradients that have arrived."""
        while self._waiting:
            self._view.apply(self._next_round())

    def after_step(self) -> None:
        """End a step: apply, push, take over, and wait while this rank is too far ahead."""
        assert self._mailbox is not None
        self._clocks.step += 1
        self._apply()
        for peer in self._peers:
            self._push(peer)
        self._serve(self._mailbox.poll())  # ranks of one pace find each other's newest here
        self.counters.waits += not self._clocks.may_start
        while not self._clocks.may_start:
            self._serve(self._wait())
        self._push_where(self._clocks.lacks)
        self._take_over()

    def count_step(self) -> None:
        """Count a step that user code has left out on this rank, whose gradient is nothing."""
        if self._step is WorkerStep.COUNTED:
            self.before_step()
            self._view.apply(self._sent([None] * len(self._view.params)))
            self.after_step()
        self._step = self._step.to(WorkerStep.COUNTED)

    # --- consensus ------------------------------------------------------------------------------

    def agree(self) -> None:
        """Apply every gradient and hand over every shard; each must call, after as many steps."""
        self._engine.adopt_assigned()
        if self._mailbox is not None:
            while min(self._clocks.arrived) < self._clocks.step:
                self._serve(self._wait())
            self._apply()
            for peer in self._peers:
                self._push(peer, Kind.LAST)
            while len(self._last) < len(self._peers):
                self._take_in(self._mailbox.wait())
            self._mailbox.finish()
            self._take_over()
            self._mailbox = None
        self._engine.share_buffers()

    @contextmanager
    def _around_methods(self, _: Optimizer) -> Iterator[None]:
        """Let parameters show the shards that this rank has state of; each rank must call."""
        if not self._engine.is_alone:
            yield
            return
        self.agree()
        flats = self._view.flats = [one.flat for one in self._engine.gradients if one.is_trained]
        self._view.show_nothing_new()
        try:
            yield
        finally:
            self._view.leave()
            bring_together(flats)

    def finish(self) -> None:
        """End asynchronous training: ranks agree, and average gradients again."""
        self.agree()
        self._engine.rejoin()

    def abandon(self) -> None:
        """After a failure, leave nothing behind that waits for a peer."""
        if self._mailbox is not None:
            self._mailbox.abandon()
            self._mailbox = None

    # --- messages -------------------------------------------------------------------------------

    def _send(self, peer: int, message: Message, kind: Kind, version: Sequence[int]) -> None:
        assert self._mailbox is not None
        message.address(kind, self._mailbox.received[peer], version)
        self._mailbox.send(peer, message.data)

    def _push(self, peer: int, kind: Kind = Kind.SHARD) -> None:
        self._send(peer, self._wire.shard(), kind, self._clocks.own)
        self._clocks.hand_over(peer)
        self.counters.pushes += 1

    def _push_where(self, needs: Callable[[int], bool]) -> None:
        for peer in filter(needs, self._peers):
            self._push(peer)

    def _serve(self, arrivals: Sequence[tuple[int, Tensor]]) -> None:
        """Take messages in, and apply and push where that lets a rank go on."""
        self._take_in(arrivals)
        if self._clocks.must_apply:
            self._apply()
        self._push_where(self._clocks.waits)

    def _wait(self) -> Sequence[tuple[int, Tensor]]:
        """Wait for messages that this rank needs; a peer that has ended too early sends none."""
        assert self._mailbox is not None
        for peer in self._last:
            self._check_steps(peer)
        return self._mailbox.wait()

    def _take_in(self, arrivals: Sequence[tuple[int, Tensor]]) -> None:
        assert self._mailbox is not None
        for peer, data in arrivals:
            message = Message(self._wire, data)
            self._mailbox.arrived_there(peer, message.received)
            if message.kind is Kind.GRADIENT:
                own = self._wire.own_gradient(message, self._ranks.rank)
                counts = bool(message.present.any())
                self._waiting.append(Arrived(peer, own, message.version, counts))
                self._clocks.arrive(peer)
                continue
            self._newest[peer] = message
            self._clocks.learn(peer, message.version)
            if message.kind is Kind.LAST:
                self._last.add(peer)
                self._check_steps(peer)

    def _check_steps(self, peer: int) -> None:
        """Raise unless a peer that has come to its end has taken as many steps as this rank."""
        theirs = self._clocks.included[peer][peer]
        if theirs < self._clocks.step:
            raise ConfigError(
                f"Rank {self._ranks.rank} has taken {self._clocks.step} steps and rank {peer} "
                f"{theirs} before all ranks meet, expected the same number. Give every rank the "
                f"same number of batches, and save checkpoints on all ranks at the same step."
            )

    def _take_over(self) -> None:
        """Update the parameters held here with the shards that have come."""
        for peer, message in self._newest.items():
            self._wire.take_over(message, peer)
        self._newest.clear()


def mean(
    gradients: Sequence[Sequence[Tensor | None]], weights: Sequence[float]
) -> list[Tensor | None]:
    """Return the weighted mean by parameter, where None is zero; None where no rank has one."""
    shares = [weight / (sum(weights) or 1.0) for weight in weights]
    return [
        _mean_of_one([(grad, share) for grad, share in zip(one, shares, strict=True)])
        for one in zip(*gradients, strict=True)
    ]


def _mean_of_one(parts: Sequence[tuple[Tensor | None, float]]) -> Tensor | None:
    """Return the mean of one parameter's gradients, summed in float32 or wider."""
    total: Tensor | None = None
    for grad, share in parts:
        if grad is not None:
            wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
            total = wide * share if total is None else total.add_(wide, alpha=share)
            dtype = grad.dtype
    return None if total is None else total.to(dtype)


def check_learning_rates(optimizer: Optimizer) -> None:
    """Raise ConfigError if a group of the optimizer has no learning rate."""
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has a group without a learning rate, by which "
            f"asynchronous SGD weighs each gradient; expected 'lr' in every group. Use an "
            f"optimizer that has one, or staleness_bound=0."
        )
