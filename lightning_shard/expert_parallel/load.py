"""Counters of a mixture: how many tokens its experts got, and how many travelled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives


@dataclass(kw_only=True, eq=False)
class Load:
    """What one rank has seen of a mixture since the beginning of a run.

    Attributes:
        num_sent_away: Rows, one for each token and expert, that went to experts of other ranks.
        num_kept: Rows whose expert is on this rank.
        received: Rows that came to each of this rank's experts, int64, shape (E / W,).
    """

    num_calls: int = 0
    num_sent_away: int = 0
    num_kept: int = 0
    received: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    is_counted: bool = True

    def note(self, sent: Sequence[int], rank: int, received: Tensor) -> None:
        """Count one call: rows to each rank, and those that came for each expert, (E / W,)."""
        if not self.is_counted:
            return
        self.num_calls += 1
        self.num_kept += sent[rank]
        self.num_sent_away += sum(sent) - sent[rank]
        own = received.detach()
        self.received = own.clone() if self.received.numel() == 0 else self.received + own


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """The load of a mixture over all ranks.

    Attributes:
        num_calls: Calls of the mixture in training, on each rank that has it.
        tokens: Tokens that each of the E experts got.
        num_sent_away: Those of them that went to an expert of another rank.
    """

    name: str
    num_calls: int
    tokens: tuple[int, ...]
    num_sent_away: int

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean; 1 where all have the same, 0 without any."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)

    @property
    def sent_away(self) -> float:
        """Share of the tokens that went to an expert of another rank, 0 to 1."""
        return self.num_sent_away / max(sum(self.tokens), 1)

    def since(self, before: "ExpertLoad | None") -> "ExpertLoad":
        """Return what has come since an earlier load of the same mixture."""
        if before is None:
            return self
        return replace(
            self,
            num_calls=self.num_calls - before.num_calls,
            tokens=tuple(now - then for now, then in zip(self.tokens, before.tokens, strict=True)),
            num_sent_away=self.num_sent_away - before.num_sent_away,
        )


def loads_of_ranks(
    loads: Mapping[str, tuple[Load, int]], group: Collectives, others: Sequence[Collectives]
) -> dict[str, ExpertLoad]:
    """Bring the counters of all mixtures together; each rank must call."""
    own = {
        name: (
            load.num_calls,
            load.num_sent_away,
            load.received.tolist() or [0] * (num_experts // group.size),
        )
        for name, (load, num_experts) in loads.items()
    }
    ranks = group.all_gather_object(own)
    found = {
        name: ExpertLoad(
            name=name,
            num_calls=load.num_calls,
            tokens=tuple(int(num) for one in ranks for num in one[name][2]),
            num_sent_away=sum(one[name][1] for one in ranks),
        )
        for name, (load, _) in loads.items()
    }
    for other in others:
        found = {
            name: _sum([one[name] for one in other.all_gather_object(found)]) for name in loads
        }
    return found


def _sum(loads: Sequence[ExpertLoad]) -> ExpertLoad:
    return replace(
        loads[0],
        num_calls=max(one.num_calls for one in loads),
        tokens=tuple(map(sum, zip(*(one.tokens for one in loads), strict=True))),
        num_sent_away=sum(one.num_sent_away for one in loads),
    )
