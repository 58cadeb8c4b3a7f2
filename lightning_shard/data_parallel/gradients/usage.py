"""Agreement on which parameters have a gradient, so that every rank's optimizer skips the same.

A parameter that no rank used has no gradient on a single device, and an optimizer leaves it
alone; one that any rank used has. After the gradients, ranks take the maximum of one byte per
parameter. Only a rank that did not use some parameter itself has to read the answer.

Under stage 3 a digest of the units that this rank unsharded, in order, and its complement travel
along: ranks that unshard different units of one size would mix their shards without a word.

An optimizer's step may raise on one rank alone, where user code catches it. The others' shards are
updated then, and that rank's are not: it tells, and asks whether there is a rank without the error.
So does a rank before it reduces gradients again, which reentrant checkpoints have brought late.
"""

import zlib
from collections.abc import Sequence

import torch

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.backends.streams import sent_up
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients
from lightning_shard.data_parallel.memory.equal_weights import EqualWeights
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.errors import ConfigError

_DIGEST_BYTES = 4
_FAILED, _REDUCES_AGAIN, _IS_AS_EXPECTED = range(3)  # ranks tell, and see the highest


class UnshardRecord:
    """A digest that is the same on two ranks only when they unsharded the same units."""

    def __init__(self) -> None:
        self._checksum = 0
        self._names: dict[str, None] = {}

    def note(self, index: int, name: str) -> None:
        """Note that the unshard of unit `index` begins."""
        self._checksum = zlib.crc32(index.to_bytes(4), self._checksum)
        self._names[name] = None

    def digest(self) -> bytes:
        """Return the checksum of the unsharded units and its complement.

        The maximum over all ranks is one's own digest only where all ranks have the same.
        """
        checksum = self._checksum.to_bytes(_DIGEST_BYTES)
        return checksum + bytes(255 - byte for byte in checksum)

    def take(self) -> list[str]:
        """Return the names of the units, each once, and begin anew."""
        names = list(self._names)
        self._checksum, self._names = 0, {}
        return names


class UsageAgreement:
    """One agreement per optimizer step over all parameters of an engine."""

    def __init__(
        self,
        gradients: Sequence[FlatGradients],
        collectives: Collectives,
        device: torch.device,
        unshards: UnshardRecord | None = None,
        weights: EqualWeights | None = None,
        may_differ_in_backward: bool = False,
    ) -> None:
        self.may_differ_in_backward = may_differ_in_backward
        self._gradients = gradients
        self._collectives = collectives
        self._device = device
        self._unshards = unshards
        self._weights = weights if weights is not None and weights.compares else None
        self._digest = self._known_digest = b""
        self._has_failed = False
        self._pending: Pending | None = None
        self._flags = torch.empty(0)

    def note_failed_update(self) -> None:
        """Note that an optimizer's step has raised on this rank, in the middle of its update."""
        self._has_failed = True

    def check_equal(self) -> None:
        """Compare which gradients there are between micro-batches; each rank must call."""
        there = [int(is_there) for one in self._gradients for is_there in one.which_are_there]
        message = bytes(there) + bytes(1 - is_there for is_there in there)
        flags = sent_up(_as_tensor(message), self._device)
        self._collectives.all_reduce(flags, "max").wait()
        some, none = flags.view(2, -1).tolist()
        names = [one.own.name(i) for one in self._gradients for i in range(len(one.states))]
        for name, has_one, lacks_one in zip(names, some, none, strict=True):
            if has_one and lacks_one:
                raise ConfigError(
                    f"Rank {self._collectives.rank}: .grad is used between micro-batches that are "
                    f"accumulated, where some ranks have a gradient of {name!r} and others have "
                    f"not used it yet, expected the same on all: code that asks whether .grad is "
                    f"None would do different things on them. Use it in on_after_backward, after "
                    f"which ranks agree, or once the last micro-batch has been reduced."
                )

    def begin(self, late: Sequence[FlatGradients] = ()) -> None:
        """Start the exchange; each rank must call, after its reductions but `late` have started.

        Raises:
            ConfigError: This rank has to reduce the gradients in `late` again, and not all have.
        """
        used = b"".join(one.states.is_used for one in self._gradients)
        again = [one for one in late if one in self._gradients]
        if self._unshards is not None:
            self._digest = self._unshards.digest()
        moved = bytes([self._weights.have_moved]) if self._weights is not None else b""
        state = _REDUCES_AGAIN if again else _IS_AS_EXPECTED
        told = bytes([_FAILED if self._has_failed else state])
        message = _as_tensor(used + told + moved + self._digest)
        self._flags = sent_up(message, self._device)
        self._pending = self._collectives.all_reduce(self._flags, "max", async_op=True)
        if again:
            self._pending.wait()
            self._check_again(again[0], int(self._flags[len(used)]))

    def finish(self) -> None:
        """Wait for the answer, and mark the gradients that are valid."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self._check_digest()
        num_params = sum(len(one.states) for one in self._gradients)
        self._check_failed(self._flags[num_params])
        if self._weights is not None:
            self._weights.agree(self._flags[-1])
        complete = all(one.all_trained_are_used for one in self._gradients)
        flags = [] if complete else self._flags.tolist()
        start = 0
        for states in (one.states for one in self._gradients):
            stop = start + len(states)
            states.validate(states.is_used if complete else flags[start:stop])
            start = stop

    def _check_again(self, late: FlatGradients, highest: int) -> None:
        if highest == _IS_AS_EXPECTED:
            name = late.own.name(late.states.is_local.index(True))
            raise ConfigError(
                f"Rank {self._collectives.rank}: the gradient of {name!r} arrived again after its "
                f"unit had been reduced, but not on every rank, expected the same on all: this "
                f"rank alone would average it again. Use activation checkpointing with "
                f"use_reentrant=False, or ZeRO stage 1."
            )

    def _check_failed(self, some_are_whole: torch.Tensor) -> None:
        if not self._has_failed:
            return
        self._has_failed = False
        if bool(some_are_whole):
            raise ConfigError(
                f"Rank {self._collectives.rank}: an optimizer's step raised on this rank and was "
                f"caught, but it did not raise on every rank, expected the same on all: other "
                f"ranks have updated their shards, and this one has not. Decide on every rank "
                f"alike whether to step, by self.all_gather(flag).any() for example, or let the "
                f"error end the run."
            )

    def _check_digest(self) -> None:
        names = [] if self._unshards is None else self._unshards.take()
        if self._digest == self._known_digest:
            return
        if bytes(self._flags[-len(self._digest) :].tolist()) != self._digest:
            raise ConfigError(
                f"Rank {self._collectives.rank}: the ranks used different blocks in this step, "
                f"expected the same ones in the same order; this rank used {', '.join(names)}. "
                f"ZeRO stage 3 unshards each block from all ranks. Name the class of a module "
                f"around the blocks that ranks may skip, as units=['MixtureOfExperts'], or use "
                f"stage 2."
            )
        self._known_digest = self._digest


class UsageOfSeveral:
    """Agreements of ranks that have different parameters besides those that all have."""

    def __init__(self, first: UsageAgreement, others: Sequence[UsageAgreement]) -> None:
        self._first, self._all = first, (first, *others)
        self.may_differ_in_backward = True

    def note_failed_update(self) -> None:
        """Note that an optimizer's step has raised on this rank, in the middle of its update."""
        self._first.note_failed_update()

    def check_equal(self) -> None:
        """Compare which gradients there are; see `UsageAgreement`."""
        for one in self._all:
            one.check_equal()

    def begin(self, late: Sequence[FlatGradients] = ()) -> None:
        """Start the exchanges; each rank must call."""
        for one in self._all:
            one.begin(late)

    def finish(self) -> None:
        """Wait for the answers, and mark the gradients that are valid."""
        for one in self._all:
            one.finish()


def agreement(
    gradients: Sequence[FlatGradients],
    reducing: DataGroups,
    split: ModelSplit,
    device: torch.device,
    unshards: UnshardRecord | None,
    weights: EqualWeights,
    *,
    may_differ: bool,
) -> UsageAgreement | UsageOfSeveral:
    """Return the agreement of an engine; see `UsageAgreement`."""
    common, others = [*gradients], list[UsageAgreement]()
    for fewer in split.fewer_ranks:
        apart = [one for one in common if one.flat.groups is fewer.data]
        common = [one for one in common if one not in apart]
        others.append(UsageAgreement(apart, fewer.reducing.dp, device))
    first = UsageAgreement(common, reducing.dp, device, unshards, weights, may_differ)
    return UsageOfSeveral(first, others) if others else first


def _as_tensor(message: bytes) -> torch.Tensor:
    """Return a message as a tensor with memory of its own."""
    if not message:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
