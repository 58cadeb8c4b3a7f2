"""A check that ranks which each hold every parameter (stage 0) keep the same values.

    optimizer's view ends ──> the parameters' version counters are known
    a hook edits in place ──> a counter has moved: one byte of `UsageAgreement` says so
    end of a backward     ──> where any rank says so, ranks compare what their parameters hold

Edits past the version counters, `weight.data.normal_()` say, are found when ranks compare now and
then anyway.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.content import contents, differ
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.views.tensor_properties import VERSION
from lightning_shard.errors import ConfigError

_COMPARE_EVERY = 64  # agreements
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4  # ranks on other hardware round otherwise: that is no edit


class EqualWeights:
    """Compares the parameters of ranks that must have the same.

    Args:
        buffers: All buffers of an engine, each with the group of the ranks that must have the same
            values. Those of stage 0 are compared, where there are several ranks.
        device: Where the numbers that ranks exchange lie.
    """

    def __init__(
        self,
        buffers: Sequence[tuple[FlatParameters, Collectives]],
        ranks: Collectives,
        device: torch.device,
    ) -> None:
        self._ranks, self._device = ranks, device
        compared = [one for one in buffers if one[0].stage == 0 and one[1].size > 1]
        self._flats = [flat for flat, _ in compared]
        self._of_ranks: dict[Collectives, list[FlatParameters]] = {}
        for flat, having in compared:
            self._of_ranks.setdefault(having, []).append(flat)
        self.compares = bool(self._flats)
        self._num_agreements = 0
        self._was_assigned = False
        self.know()

    def know(self) -> None:
        """Note that the parameters' present values are the same on all ranks (after an update)."""
        self._known = self._versions()

    def note_assigned(self) -> None:
        """Note that user code has assigned a value to a parameter."""
        self._was_assigned = True

    def _versions(self) -> int:
        return sum(sum(map(VERSION, flat.params)) for flat in self._flats)

    @property
    def have_moved(self) -> bool:
        """Whether user code has changed parameters on this rank since `know`, by a quick check."""
        return self._was_assigned or self._versions() != self._known

    def agree(self, message: Tensor) -> None:
        """Compare if any rank has changed something, or now and then; each rank must call.

        `message` is `have_moved` of any rank, shape (), which is read on the CPU alone: elsewhere
        every step would have to wait for the device.
        """
        self._num_agreements += 1
        is_due = self._num_agreements % _COMPARE_EVERY == 0
        if is_due or (message.device.type == "cpu" and bool(message)):
            self._compare()
            self._was_assigned = False
            self.know()

    @torch.no_grad()
    def _compare(self) -> None:
        names = [
            name
            for ranks, flats in self._of_ranks.items()
            if self._differ(flats, ranks)
            for name in self._differing(flats, ranks)
        ]
        if names:
            raise ConfigError(
                f"Rank {self._ranks.rank}: the ranks have different values of "
                f"{', '.join(map(repr, names[:3]))}{', ...' if names[3:] else ''}, expected the "
                f"same on all, each of which trains all of the model: a hook or step has changed "
                f"parameters with what is one rank's own, random numbers for example. Draw them "
                f"after torch.manual_seed(seed) with the same seed on every rank, or change the "
                f"parameters on rank 0 and send them: "
                f"param.data.copy_(self.trainer.strategy.broadcast(param.data))."
            )

    def _differ(self, flats: Sequence[FlatParameters], ranks: Collectives) -> bool:
        number = contents([flat.full for flat in flats], self._device)
        return bool(differ(number, ranks))

    def _differing(self, flats: Sequence[FlatParameters], ranks: Collectives) -> list[str]:
        """Return the names of parameters whose values on some rank are not rank 0's."""
        names, differs = [], []
        for flat in flats:
            first = flat.full.clone()
            ranks.broadcast(first, src=0).wait()
            for slot in flat.layout.slots:
                own, its = (one[slot.offset : slot.stop] for one in (flat.full, first))
                names.append(slot.name)
                differs.append(not torch.allclose(own, its, _RELATIVE, _ABSOLUTE, equal_nan=True))
        flags = torch.tensor(differs, dtype=torch.uint8, device=self._device)
        ranks.all_reduce(flags, "max").wait()
        return [name for name, differ in zip(names, flags.tolist(), strict=True) if differ]
