"""A step of all ranks of a pipeline, one after the other, without elements.

    rank 0   F0 F1 ...                          each rank goes on until it waits for a message
    rank 1         F0 F1 ..  B0                 of another

Microbatches of one size cost the same: one of them is run and counts for all. Under ZeRO stage 3
the unsharded units depend on the order, so there each microbatch is run.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.schedules import Action, Schedule, StageInput
from lightning_shard.pipeline_parallel.skipped_blocks import UnknownResultError
from lightning_shard.pipeline_parallel.stage_run import Needed
from lightning_shard.planner.activation_bytes import ActivationBytes, Kept, at_once, peak
from lightning_shard.planner.simulated_model import SimulatedModel
from lightning_shard.planner.simulated_rank import SimulatedRank

_STEPS_OF_STAGE_3 = 2  # what is gathered ahead follows the step before


class SimulatedPipeline:
    """The ranks of one pipeline.

    Args:
        model: The model without elements, shared by the ranks.
        schedule: Schedule of the pipeline's step.
        microbatches: Microbatches of a batch, without elements.
    """

    def __init__(
        self, model: SimulatedModel, schedule: Schedule, microbatches: Sequence[Microbatch]
    ) -> None:
        self._model = model
        self.ranks = [SimulatedRank(rank, model) for rank in range(schedule.num_ranks)]
        self.schedule, self.microbatches = schedule, microbatches
        sizes = [one.size for one in microbatches]
        every = model.options.engine.stage == 3
        self._weights = {  # how many microbatches each one that is run counts for
            index: 1 if every else sizes.count(size)
            for index, size in enumerate(sizes)
            if every or sizes.index(size) == index
        }
        self._made: dict[StageInput, list[Tensor]] = {}
        self._arrived: dict[StageInput, list[Tensor]] = {}
        self._needed: list[Needed | None] = []

    def run(self) -> None:
        """Run a step on every rank, up to the optimizer's."""
        with self._model.staged.batch():
            self._needed = self._needs()
        for _ in range(_STEPS_OF_STAGE_3 if self._model.options.engine.stage == 3 else 1):
            self._run_step()

    def _run_step(self) -> None:
        for rank in self.ranks:
            rank.begin_step()
        with self._model.staged.batch():
            steps = [rank.in_step() for rank in self.ranks]
            self._run_actions()
        for rank, step in zip(self.ranks, steps, strict=True):
            step.close()
            rank.hand_over()
            rank.count()

    def _run_actions(self) -> None:
        waiting = [self._chosen(rank.rank) for rank in self.ranks]
        while any(waiting):
            for rank, actions in zip(self.ranks, waiting, strict=True):
                while actions and self._act(rank, actions[0]):
                    del actions[0]

    def _chosen(self, rank: int) -> list[Action]:
        return [one for one in self.schedule.actions[rank] if one.microbatch in self._weights]

    def _needs(self) -> list[Needed | None]:
        """Return the tensors that each stage needs of earlier ones."""
        try:
            return self._probed()
        except UnknownResultError:
            self._model.staged.hint = self._model.probe(0, self.microbatches[0]).template
            return self._probed()

    def _probed(self) -> list[Needed | None]:
        """Probe each stage with the smallest and then the largest microbatch."""
        for microbatch in (self.microbatches[-1], self.microbatches[0]):
            stages = range(1, self.schedule.num_stages)
            needs = [self._model.probe(stage, microbatch).needed for stage in stages]
        if None in needs:
            raise ConfigError(
                f"The training step ended without calling the first block of stage "
                f"{needs.index(None) + 1}, expected it to call the network once, all blocks in "
                f"order."
            )
        return [None, *needs, None]  # of the first stage, and after the last

    def _act(self, rank: SimulatedRank, action: Action) -> bool:
        """Do one action; return False when its message has not come."""
        weight = self._weights[action.microbatch]
        kind = action.kind
        if kind == "F":
            done = self._forward(rank, action)
        elif kind in ("B", "I"):
            done = self._backward(rank, action)
        elif kind == "W":
            rank.backward_weights(action.stage, self.microbatches[action.microbatch])
            done = True
        elif kind.startswith("SEND"):
            message = action.output
            self._arrived[message] = self._made.pop(message)
            rank.send(self._arrived[message], weight)
            return True
        else:
            return True
        rank.count(weight)
        return done

    def _forward(self, rank: SimulatedRank, action: Action) -> bool:
        stage, _, index = action
        if stage > 0 and (stage, "F", index) not in self._arrived:
            return False
        received = self._arrived.pop((stage, "F", index)) if stage > 0 else None
        outputs = rank.forward(stage, self.microbatches[index], received, self._needed[stage + 1])
        self._hand_on(rank, action, outputs)
        return True

    def _backward(self, rank: SimulatedRank, action: Action) -> bool:
        stage, _, index = action
        is_last = stage == self.schedule.num_stages - 1
        if not is_last and (stage, "B", index) not in self._arrived:
            return False
        grads = None if is_last else self._arrived.pop((stage, "B", index))
        run = rank.backward if action.kind == "B" else rank.backward_inputs
        self._hand_on(rank, action, run(stage, self.microbatches[index], grads))
        return True

    def _hand_on(self, rank: SimulatedRank, action: Action, tensors: Sequence[Tensor]) -> None:
        """Keep tensors for their message, or give them to this rank's own stage."""
        message = action.output
        is_here = message[0] in rank.stages
        (self._arrived if is_here else self._made)[message] = [
            one.detach().requires_grad_(one.requires_grad) for one in tensors
        ]

    def peak_activations(self, rank: SimulatedRank) -> ActivationBytes:
        """Return the most bytes that a rank keeps for the backwards to come."""
        return peak(state.values() for state in self._in_flight(rank))

    def _in_flight(self, rank: SimulatedRank) -> Iterator[dict[StageInput, Kept]]:
        """Yield what is kept after each of a rank's actions, by stage and microbatch."""
        state: dict[StageInput, Kept] = {}
        for stage, kind, index in self.schedule.actions[rank.rank]:
            if kind == "F":
                size = self.microbatches[index].size
                state[stage, kind, index] = rank.saved.get((stage, size), Kept(0))
                yield state
            elif kind in ("B", "W"):
                state.pop((stage, "F", index), None)


def run_unpipelined(rank: SimulatedRank, batch: Microbatch) -> ActivationBytes:
    """Run a step of a model that is full on its rank; return what is kept for the backward."""
    rank.begin_step()
    with rank.in_step():
        rank.train_full(batch)
    rank.count()
    return at_once([rank.saved[0, batch.size]])
