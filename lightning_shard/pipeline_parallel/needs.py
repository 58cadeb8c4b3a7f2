"""What each stage needs of earlier ones: results for its first block, and parameters that are lent.

    stage 1    step ──> before ──> blocks of stage 0 ──> its first block, called with ...
               (Placeholder)         (skipped)             which of these are Placeholder?

    stage 0    embed.weight ──value, before each batch──► stage 1    penalty, tied use, last norm
               its gradient ◄──sum, after each batch────             (a leaf of its own graph)

Both are found once per kind of step, or by the first microbatch. Every rank tells all others, since
a stage must send what the next one has found to be missing. The borrower holds a value for as long
as a batch takes, and no optimizer state.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import OtherStageError
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.gradients import AtHand, GradientStash, sum_dtype
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.skipped_blocks import UnknownResultError
from lightning_shard.pipeline_parallel.stage_run import Needed, Probe
from lightning_shard.pipeline_parallel.staged_model import StagedModel

Wanted = Mapping[int, frozenset[str]]
"""The names of the parameters that each stage wants to borrow."""


class Lending:
    """Sends values to the stages that borrow them, and gradients back; each rank calls alike."""

    def __init__(
        self, model: StagedModel, group: Collectives, stage_ranks: Sequence[int], at_hand: AtHand
    ) -> None:
        self._model, self._group, self._stage_ranks = model, group, stage_ranks
        self._at_hand = at_hand
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
    def lend(self) -> None:
        """Send the lent values, and set them as the borrowers' parameters."""
        sending = []
        for tag, (key, param, owner, borrower) in enumerate(self._each()):
            if self._group.rank == owner:
                with self._at_hand([param]):
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

    @property
    def loans(self) -> list[tuple[int, nn.Parameter]]:
        """The parameters that are lent, each with the stage that borrows it."""
        return [(stage, param) for (stage, _), param in self._loans.items()]

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


_NUM_SEEDS = 2**32


class StageRandomness:
    """Seeds the generators of Python, numpy and torch for each stage's run of a microbatch.

        microbatch i    before the blocks: seed(i), on each stage      (noise, timesteps, mixing)
                        from the blocks on: seed(i, stage)             (dropout)

    Every stage runs the user's step, so the step's own random numbers must agree; those of blocks
    must not repeat another stage's. The common number comes from rank 0's generator once.
    """

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self._device = device
        drawn = int(torch.randint(_NUM_SEEDS, ()).item())
        self._generator = random.Random(group.broadcast_object(drawn))
        self._batch = 0

    @property
    def state(self) -> list[Any]:
        """What the seeds of later batches come from, as numbers and lists."""
        version, words, second = self._generator.getstate()
        return [version, list(words), second]

    @state.setter
    def state(self, state: list[Any]) -> None:
        version, words, second = state
        self._generator.setstate((version, tuple(words), second))

    def next_batch(self) -> None:
        """Go on to the seeds of another batch; each rank must call."""
        self._batch = self._generator.randrange(_NUM_SEEDS)

    def begin(self, microbatch: int) -> None:
        """Seed the generators as every stage does for this microbatch."""
        self._seed(microbatch, 0)

    def left(self) -> list[Tensor]:
        """Return what goes to the next stage beside the results of this one: nothing."""
        return []

    def taken_off(self, received: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return what another stage has sent, without what has come of `left`, and that."""
        return received, []

    def enter(self, microbatch: int, stage: int, came: Sequence[Tensor] = ()) -> None:
        """Seed the generators as no other stage does for this microbatch."""
        if stage > 0:
            self._seed(microbatch, stage)

    def _seed(self, microbatch: int, stage: int) -> None:
        digest = blake2b(f"{self._batch} {microbatch} {stage}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest)
        # torch.manual_seed would also queue a seed, with a traceback, for every absent accelerator
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


_SKIPPED = Needed((), -1)  # the step has returned None before it called the network
Checked = Callable[[Any], None]  # refuses a step's result, where it is another stage's
Step = Callable[[Microbatch, Checked | None], Any]  # None on other stages than the last


class Needs:
    """Learns the needs of all stages, kind of step by kind of step; each rank calls alike.

    Attributes:
        wanted: The parameters of other stages that steps have asked for, since `forget`.
    """

    def __init__(
        self,
        model: StagedModel,
        group: Collectives,
        own_stages: Collection[int],
        stage_ranks: Sequence[int],
        randomness: StageRandomness,
    ) -> None:
        self._model, self._group, self._randomness = model, group, randomness
        self._own_stages, self._stage_ranks = own_stages, stage_ranks
        self._known: dict[str, list[Needed | None]] = {}
        self._without_network: set[str] = set()
        self._calls_blocks = False  # the step that was tried last, on any rank
        self.wanted: list[Wanted] = []

    def of(self, kind: str, stage: int) -> Needed | None:
        """Return what a stage needs in a kind of step; None after the last stage."""
        return self._known[kind][stage] if stage < len(self._stage_ranks) else None

    def forget(self, *kinds: str) -> None:
        """Learn kinds of step anew; all where none is given."""
        for kind in kinds or list(self._known):
            self._known.pop(kind, None)
        self.wanted = []

    def learn(
        self, kind: str, microbatches: Sequence[Microbatch], step: Step, *, must_use: bool
    ) -> bool:
        """Find, for a new kind of step, what each stage's first block needs of earlier stages."""
        if kind in self._known or len(self._stage_ranks) == 1:
            return True
        if kind in self._without_network:
            return False
        all_stages = self._of_all_known(microbatches[0], step)
        if self.wanted:
            return True
        for microbatch in microbatches[1:] if must_use else ():
            if set(all_stages.values()) != {_SKIPPED}:
                break
            all_stages = self._of_all_known(microbatch, step)
        if must_use and set(all_stages.values()) == {_SKIPPED}:
            return False
        missing = [stage for stage, one in all_stages.items() if one is None or one == _SKIPPED]
        if not (must_use or self._calls_blocks) and len(missing) == len(all_stages):
            self._without_network.add(kind)
            return False
        if missing:
            block = self._model.block_names[self._model.partition.bounds[missing[0]]]
            raise ConfigError(
                f"The {kind} step ended without calling the block {block!r} of stage "
                f"{missing[0]}, expected it to call the network once, all blocks in order."
            )
        self._known[kind] = [all_stages.get(stage) for stage in range(len(self._stage_ranks))]
        return True

    def _of_all_known(self, microbatch: Microbatch, step: Step) -> dict[int, Needed | None]:
        """Return what each stage needs; None where its block is not called."""
        all_stages = self._of_all(microbatch, step)
        if not self.wanted and any(isinstance(needed, str) for needed in all_stages.values()):
            self._learn_of_blocks(microbatch, step)
            all_stages = self._of_all(microbatch, step)
        known: dict[int, Needed | None] = {}
        for stage, needed in all_stages.items():
            if isinstance(needed, str) and not self.wanted:
                raise ConfigError(f"Before stage {stage} of the pipeline: {needed}")
            known[stage] = None if isinstance(needed, str) else needed
        return known

    def _of_all(self, microbatch: Microbatch, step: Step) -> dict[int, Needed | str | None]:
        """Return what each stage needs; a text where that could not be found, and says why."""
        wanted: dict[int, frozenset[str]] = {}
        found: dict[int, Needed | str | None] = {}
        self._calls_blocks = False
        for stage in filter(None, self._own_stages):
            try:
                probe = self._probe(stage, microbatch, step)
                self._calls_blocks |= probe.is_called
                found[stage] = _SKIPPED if probe.is_skipped else probe.needed
            except UnknownResultError as error:
                found[stage] = str(error.__cause__)
            except OtherStageError as error:
                if not lendable(self._model.params, error.origins):
                    raise
                wanted[stage] = error.origins
        all_stages: dict[int, Needed | str | None] = {}
        mine = (found, wanted, self._calls_blocks)
        for theirs, asked, calls in self._group.all_gather_object(mine):
            all_stages |= theirs
            self._calls_blocks |= calls
            self.wanted += [asked] if asked else []
        return all_stages

    def _learn_of_blocks(self, microbatch: Microbatch, step: Step) -> None:
        """Let the first stage run its first block, and tell the others the result's metadata."""
        template = None
        if 0 in self._own_stages:
            template = self._probe(0, microbatch, step).template
        template = self._group.broadcast_object(template, src=self._stage_ranks[0])
        if template is not None and template.keeps_gradients:
            raise ConfigError(
                f"The block {self._model.block_names[0]!r} keeps tensors that require gradients "
                f"beside its result, such as an auxiliary loss, and cannot be skipped without "
                f"running it, for it asks for elements; expected that the last stage gets all "
                f"that the loss is computed from. Let the blocks take such a tensor as an argument "
                f"and return it, detach it, or turn its collection off."
            )
        self._model.set_hint(template)

    def _probe(self, stage: int, microbatch: Microbatch, step: Step) -> Probe:
        probe = Probe(self._model.partition.bounds[stage], self._model.forget)
        self._randomness.begin(microbatch.index)
        with self._model.buffers_kept(), self._model.running(probe, stage):
            probe.forward(lambda: step(microbatch, None))
        return probe
