"""Parameters that are lent to stages which use them outside of the blocks.

    stage 0    embed.weight ──value, before each batch──► stage 1    penalty, tied use, last norm
               its gradient ◄──sum, after each batch────             (a leaf of its own graph)

What a stage wants is found when a kind of step is learned, or by the first microbatch. The borrower
holds the value for as long as a batch takes, and no optimizer state.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.pipeline_parallel.backward import AtHand
from lightning_shard.pipeline_parallel.gradients import GradientStash, sum_dtype
from lightning_shard.pipeline_parallel.staged_model import StagedModel

Wanted = Mapping[int, frozenset[str]]
"""The names of the parameters that each stage wants to borrow."""


class Lending:
    """Sends values to the stages that borrow them, and gradients back; each rank calls alike."""

    def __init__(self, model: StagedModel, group: Collectives, stage_ranks: Sequence[int]) -> None:
        self._model, self._group, self._stage_ranks = model, group, stage_ranks
        self._loans: dict[tuple[int, str], nn.Parameter] = {}
        self._leaves: dict[tuple[int, str], Tensor] = {}

    def add(self, wanted: Sequence[Wanted]) -> None:
        """Lend further parameters from now on, and warn how many values that sends."""
        for one in wanted:
            for stage, names in one.items():
                for name in names:
                    self._loans[stage, name] = self._model.params[name]
        self._loans = dict(sorted(self._loans.items()))
        lent = list(dict.fromkeys(name for _, name in self._loans))
        numel = sum(self._model.shape_of(param).numel() for param in self._loans.values())
        rank_zero_warn(
            f"A step uses {len(lent)} parameters outside of their stage of the pipeline "
            f"({', '.join(lent[:3])}{' ...' * (len(lent) > 3)}): {numel:,} values are sent to "
            f"other stages before each batch, and their gradients back. Register modules in the "
            f"order in which they are called, and let the optimizer's weight_decay do what "
            f"concerns the weights alone, to send nothing."
        )

    @torch.no_grad()
    def lend(self, at_hand: AtHand) -> None:
        """Send the lent values, and set them as the borrowers' parameters."""
        sending = []
        for tag, (key, param, owner, borrower) in enumerate(self._each()):
            if self._group.rank == owner:
                with at_hand([param]):
                    value = param.detach().clone()
                if owner != borrower:
                    sending.append(self._group.send(value, borrower, tag, async_op=True))
            elif self._group.rank == borrower:
                value = param.new_empty(self._model.shape_of(param))
                self._group.recv(value, owner, tag, async_op=True).wait()
            if self._group.rank == borrower:
                leaf = self._leaves[key] = nn.Parameter(value, param.requires_grad)
                leaf.__dict__ = vars(param)  # with what user code keeps on it
                self._model.lend(key[0], param, leaf)
        for pending in sending:
            pending.wait()

    def leaves(self, stage: int) -> list[Tensor]:
        """Return the borrowed values of a stage that have gradients."""
        return [
            leaf for (one, _), leaf in self._leaves.items() if one == stage and leaf.requires_grad
        ]

    @torch.no_grad()
    def give_back(self, stash: GradientStash) -> None:
        """Add the gradients of borrowed values that were used to those of their owners."""
        sending, used = [], self._used(stash)
        for tag, (key, param, owner, borrower) in enumerate(self._each()):
            if not used[tag] or self._group.rank not in (owner, borrower):
                continue
            if self._group.rank == borrower:
                grad = stash.take(self._leaves[key])
            else:
                grad = param.new_empty(self._model.shape_of(param), dtype=sum_dtype(param))
                self._group.recv(grad, borrower, tag, async_op=True).wait()
            if self._group.rank == owner:
                stash.add([param], [grad])
            else:
                sending.append(self._group.send(grad.contiguous(), owner, tag, async_op=True))
        for pending in sending:
            pending.wait()

    def _used(self, stash: GradientStash) -> list[bool]:
        """Ask all ranks which borrowed values have a gradient."""
        mine = [key in self._leaves and stash.holds(self._leaves[key]) for key in self._loans]
        device = next((param.device for param in self._loans.values()), None)
        used = torch.tensor(mine, dtype=torch.uint8, device=device)
        if mine:
            self._group.all_reduce(used, "max").wait()
        return used.bool().tolist()

    def _each(self) -> Iterator[tuple[tuple[int, str], nn.Parameter, int, int]]:
        """Yield every loan, its parameter, and the ranks of its owner and its borrower."""
        for key, param in self._loans.items():
            owner = self._stage_ranks[self._model.stages_of(param)[0]]
            yield key, param, owner, self._stage_ranks[key[0]]


def lendable(names: Mapping[str, nn.Parameter], origins: frozenset[str]) -> bool:
    """Whether a value is computed from parameters, and from no block's result."""
    return bool(origins) and all(origin in names for origin in origins)
