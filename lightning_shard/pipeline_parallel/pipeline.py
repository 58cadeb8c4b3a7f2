"""The pipeline at work: runs a schedule's actions on this rank's stages, batch by batch.

    RECV_F ──> inbox ──> F ──┬──> SEND_F
                             │ StageRun kept until its backward
    RECV_B ──> inbox ──> B ──┴──> SEND_B           B, or I (inputs) and later W (weights)
                         └──> gradient stash ──> handed over once per batch

A neighbouring stage on the same rank is handed its tensors without a message.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import OtherStageError
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.torch_private import gradient_hooks
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.alike_steps import NotedCalls, check_alike
from lightning_shard.pipeline_parallel.containers import map_tensors
from lightning_shard.pipeline_parallel.gradients import (
    GradientStash,
    full_backward,
    hooks_set_aside,
    input_backward,
    leaf_nodes,
)
from lightning_shard.pipeline_parallel.messages import (
    LossOf,
    ReceiveHandle,
    RunningBatch,
    StageAction,
    StageTraffic,
    followed,
)
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.needs import (
    Lending,
    Needs,
    StageRandomness,
    Step,
    Wanted,
    lendable,
)
from lightning_shard.pipeline_parallel.schedules import (
    Action,
    Kind,
    Schedule,
    forward_schedule,
    with_early_receives,
)
from lightning_shard.pipeline_parallel.stage_run import StageRun
from lightning_shard.pipeline_parallel.staged_model import StagedModel
from lightning_shard.pipeline_parallel.step_edits import (
    BuffersOfFirst,
    EditMarks,
    StepBuffers,
    StepEdits,
)
from lightning_shard.pipeline_parallel.ties_in_order import StashInOrder, TiesInOrder

Observer = Callable[[Action], AbstractContextManager[object]]

_FORWARD = ("F", "RECV_F", "SEND_F")
_MAX_ATTEMPTS = 4  # to find out what stages want to borrow
_RECEIVES: dict[Kind, Kind] = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}  # their inputs


class Pipeline:
    """Runs steps through the stages of a model.

    Args:
        model: The model, cut into stages.
        group: Group of the pipeline's ranks, in order; each must construct this.
        stage_params: Parameters of each stage of this rank.
        schedules: Makes the schedule of training for a number of microbatches.
        stage_ranks: Group rank of each stage.
        engine: Has this rank's parameters.
        marks: Tells whether training steps edit parameters; None where none is watched.
        early: Whether to post receives early: see `with_early_receives`.
        randomness: Seeds each microbatch.
        in_order: Where sums and buffers are those of microbatches that come in their order, brings
            together what stages have of one parameter.

    Attributes:
        observer: Makes the context around every action, to take its time; the wait for a
            computation's message has one of its own, as the receive.
        edits: Watches parameters for edits by training steps.
        peak_activations: Largest number of runs that were kept for their backward at one time.
    """

    def __init__(
        self,
        model: StagedModel,
        group: Collectives,
        stage_params: dict[int, list[nn.Parameter]],
        schedules: Callable[[int], Schedule],
        stage_ranks: Sequence[int],
        engine: DataParallelEngine,
        marks: EditMarks | None,
        *,
        early: bool,
        randomness: StageRandomness,
        in_order: TiesInOrder | None = None,
    ) -> None:
        self.observer: Observer | None = None
        self.peak_activations = 0
        self._model, self._group = model, group
        self._at_hand, self._reformats = engine.at_hand, engine.reformats
        self._in_order = in_order
        self._takes_early = in_order is None and not self._reformats
        self._stage_params = stage_params
        self._stage_ranks = tuple(stage_ranks)
        order = with_early_receives if early else (lambda schedule: schedule)
        self._schedules = cache(lambda number: order(schedules(number)))
        self._forward_schedules = cache(
            lambda number: order(forward_schedule(self._stage_ranks, number))
        )
        self._traffic = StageTraffic(group, engine.device, self._stage_ranks)
        last = len(stage_ranks) - 1
        buffers = StepBuffers if in_order is None else BuffersOfFirst
        self._buffers = buffers(model, group, last, has_last=last in stage_params)
        self.edits = StepEdits(model, marks)
        at_hand = partial(engine.at_hand, unrounded=True)  # lent in formats that user code sees
        self._lending = Lending(model, group, self._stage_ranks, at_hand)
        self._rehearsed: dict[str, tuple[bool, ...]] = {}  # by kind, with what was trained then
        self._wanted: dict[int, frozenset[str]] | None = None  # in a rehearsal
        self._noted: NotedCalls | None = None  # in a rehearsal of a training step
        self.randomness = randomness
        self._needs = Needs(model, group, stage_params, self._stage_ranks, self.randomness)
        self._actions: dict[Kind, StageAction] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
            **self._traffic.actions,
        }

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self._stage_ranks)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank sees the results of steps."""
        return self._stage_ranks[-1] == self._group.rank

    def train(
        self,
        kind: str,
        microbatches: Sequence[Microbatch],
        step: Step,
        loss_of: LossOf,
        seed: Tensor | float = 1.0,
    ) -> tuple[dict[int, Any], GradientStash]:
        """Run forwards and backwards of one batch; each rank must call.

        Args:
            kind: Name of the kind of step, which calls its blocks with one structure.
            microbatches: Microbatches of the batch, the same on every rank.
            step: Runs the user's step on a microbatch.
            loss_of: Finds the loss in the step's result; None skips the microbatch.
            seed: Factor of the gradients while they travel: a loss scaler's scale.

        Returns:
            The step's results by microbatch, on the last stage's rank alone, and the gradients of
            the mean over the batch's samples.
        """
        params = {param: None for own in self._stage_params.values() for param in own}
        trained = [param for param in params if param.requires_grad]
        stash, schedule = GradientStash(trained, seed), self._schedules(len(microbatches))
        if self._in_order is not None:
            self._in_order.begin(schedule)
            stash = StashInOrder(trained, seed, self._in_order)
            self._refuse_hooks()
        batch = RunningBatch(kind, microbatches, step, self._model.trainable, stash, loss_of)
        hooked = stash.hooked() if self._takes_early else nullcontext()
        with hooks_set_aside(stash.params), hooked:
            self._run(batch, schedule)
        stash.close()
        return batch.results, stash

    def _refuse_hooks(self) -> None:
        for name, param in self._model.params.items():
            if gradient_hooks(param):
                raise ConfigError(
                    f"Rank {self._group.rank}: same_bits=True, but {name!r} has a hook on its "
                    f"gradient, which a pipeline calls with the sum over the microbatches of a "
                    f"batch, expected none. Change gradients in on_before_optimizer_step, or use "
                    f"strategy='zero2'."
                )

    def evaluate(
        self, kind: str, microbatches: Sequence[Microbatch], step: Step
    ) -> dict[int, Any] | None:
        """Run the forwards of one batch, as `train` does; each rank must call.

        The results are None, on every rank, where the step does not use the network at all.
        """
        batch = RunningBatch(kind, microbatches, step)
        uses = self._run(batch, self._forward_schedules(len(microbatches)))
        return batch.results if uses else None

    def _run(self, batch: RunningBatch, schedule: Schedule) -> bool:
        """Run this rank's actions of a schedule; return whether the step uses the network."""
        if self._rehearsed.get(batch.kind, batch.trainable) != batch.trainable:
            del self._rehearsed[batch.kind]  # a penalty over what is trained uses others now
            self._needs.forget(batch.kind)
        self.randomness.next_batch()
        training = batch.stash is not None
        with (
            self._model.batch(),
            self._buffers.batch(len(batch.microbatches), training=training),
            self.edits.batch(training=training),
        ):
            self._lending.lend()
            uses = self._learn(batch)
            is_begun = uses and self._rehearse(batch)
            for action in schedule.actions[self._group.rank] if uses else ():
                if not (is_begun and action.microbatch == 0 and action.kind in _FORWARD):
                    self._act(batch, action)
            self._traffic.finish()
        if batch.stash is not None:
            self._lending.give_back(batch.stash)
        return uses

    def _learn(self, batch: RunningBatch) -> bool:
        """Learn what the stages need in a kind of step; return whether it uses the network."""
        for _ in range(_MAX_ATTEMPTS):
            uses = self._needs.learn(
                batch.kind, batch.microbatches, batch.step, must_use=batch.stash is not None
            )
            self.edits.note(min(self._stage_params))
            if not self._needs.wanted:
                return uses
            wanted = self._needs.wanted
            self._borrow(wanted)
        raise ConfigError(
            f"The {batch.kind} step uses parameters of other stages of the pipeline one after the "
            f"other, and still asks for {_named(wanted)} after {_MAX_ATTEMPTS} "
            f"attempts; expected it to use what the blocks return. Move what it does with the "
            f"weights alone, such as a teacher's update, to on_train_batch_end, or use "
            f"strategy='zero3'."
        )

    def _borrow(self, wanted: Sequence[Wanted]) -> None:
        """Let stages borrow parameters of others from now on."""
        if self._in_order is not None:
            raise ConfigError(
                f"Rank {self._group.rank}: same_bits=True, but a step uses {_named(wanted)} "
                f"outside of their stage of the pipeline, whose gradients would have another order "
                f"than on one rank, expected each parameter to be used by one stage. Let the "
                f"optimizer's weight_decay do what concerns the weights alone, or use "
                f"strategy='zero2'."
            )
        self._model.hide()
        self._lending.add(wanted)
        self._lending.lend()
        self._needs.forget()  # steps of every kind have what is borrowed, and are sent less
        self._traffic.begin_again()

    def _rehearse(self, batch: RunningBatch) -> bool:
        """Send the first microbatch through all stages, to find what they want to borrow."""
        if batch.kind in self._rehearsed or self.num_stages == 1:
            return False
        for attempt in range(_MAX_ATTEMPTS):
            before = [(one, one.clone()) for one in self._model.buffers()]
            self._wanted = {} if attempt + 1 < _MAX_ATTEMPTS else None
            self._noted = NotedCalls(self._model.held) if batch.stash is not None else None
            for action in self._forward_schedules(1).actions[self._group.rank]:
                self._act(batch, action)
            self._traffic.finish()
            calls = {} if self._noted is None else self._noted.calls
            every = self._group.all_gather_object((self._wanted, calls))
            asked = [one for one, _ in every if one]
            self._wanted = self._noted = None
            if not asked:
                check_alike([one for _, one in every], batch.kind)
                break
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            for kept in (batch.runs, batch.inbox, batch.results, batch.losses):
                kept.clear()
            self._borrow(asked)
            self._learn(batch)
        self._rehearsed[batch.kind] = batch.trainable
        return True

    @property
    def is_rehearsing(self) -> bool:
        """Whether a step that asks for what another stage has is run again."""
        return self._wanted is not None

    def _act(self, batch: RunningBatch, action: Action) -> None:
        observer = None if action.kind in _RECEIVES.values() else self.observer
        if observer is not None and action.kind in _RECEIVES:
            self._await(batch, action, observer)
        with nullcontext() if observer is None else observer(action):
            self._actions[action.kind](batch, action.stage, action.microbatch)

    def _await(self, batch: RunningBatch, action: Action, observer: Observer) -> None:
        """Wait for the message of a computation before the computation does."""
        receive = _RECEIVES[action.kind]
        coming = batch.inbox.get((receive[-1], action.stage, action.microbatch))
        if isinstance(coming, ReceiveHandle):
            with observer(action._replace(kind=receive)):
                coming.wait()

    def _forward(self, batch: RunningBatch, stage: int, index: int) -> None:
        bounds = self._model.partition.bounds
        microbatch = batch.microbatches[index]
        received, comes_of_skipped = self._traffic.inputs(batch, stage, index)
        came: list[Tensor] = []
        if received is not None:
            received, came = self.randomness.taken_off(received)
        run = StageRun(
            stage,
            bounds[stage],
            bounds[stage + 1],
            self._model.block_names,
            needed=self._needs.of(batch.kind, stage + 1),
            received=received,
            entering=partial(self.randomness.enter, index, stage, came),
            leaving=partial(self._leaving, stage),
            noted=self._noted,
        )
        run.is_skipped = self._wanted is not None and comes_of_skipped
        self.randomness.begin(index)
        with self._buffers.forward(stage):
            self._run_step(run, batch, microbatch)
        if stage < self.num_stages - 1 and not run.is_skipped:
            run.outputs += self.randomness.left()
        if stage == self.num_stages - 1:
            self._keep_loss(batch, run, microbatch)
            batch.results[index] = map_tensors(run.result, Tensor.detach)
            run.result = None
        batch.runs[stage, index] = run
        self.peak_activations = max(self.peak_activations, len(batch.runs))
        if batch.stash is None and stage == self.num_stages - 1:
            del batch.runs[stage, index]

    def _leaving(self, stage: int) -> AbstractContextManager[None]:
        return self.edits.leaving(stage, self._lending.leaves(stage))

    def _run_step(self, run: StageRun, batch: RunningBatch, microbatch: Microbatch) -> None:
        """Run a step; in a rehearsal note which parameters of other stages it wants, and go on."""
        if run.is_skipped:
            return
        try:
            with self._model.running(run, run.stage), self.edits.step(run.stage):
                checked = run.check if run.stage == self.num_stages - 1 else None
                run.forward(lambda: batch.step(microbatch, checked))
        except OtherStageError as error:
            if self._wanted is None or not lendable(self._model.params, error.origins):
                raise
            self._wanted[run.stage] = error.origins
            run.is_skipped, run.result = True, None

    def _keep_loss(self, batch: RunningBatch, run: StageRun, microbatch: Microbatch) -> None:
        if batch.stash is not None and (loss := batch.loss_of(run.result)) is not None:
            if microbatch.index == 0:
                leaves = (node.variable for node in leaf_nodes([loss]))
                self._model.refuse_others(leaves, run.stage)
            weight = microbatch.weight if self._in_order is None else 1.0
            batch.losses[microbatch.index] = loss * (weight * batch.stash.seed)

    def _roots(
        self, batch: RunningBatch, stage: int, index: int
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return the tensors at which a backward begins, and their gradients (None: one)."""
        roots: list[Tensor] = []
        grads: list[Tensor] | None = None
        if stage == self.num_stages - 1:
            loss = batch.losses.pop(index, None)
            roots = [] if loss is None or not loss.requires_grad else [loss]
        else:
            came, run = self._traffic.output_grads(batch, stage, index), batch.runs[stage, index]
            if not run.is_skipped:
                roots, grads = followed(run.outputs), [grad.detach() for grad in came]
        if self._in_order is not None:
            self._in_order.check(stage, roots)
        self._buffers.before_backward(stage)
        return roots, grads

    def _params(self, stage: int) -> list[nn.Parameter]:
        own = [param for param in self._stage_params[stage] if param.requires_grad]
        return [*own, *self._lending.leaves(stage)]  # type: ignore[list-item]

    def _backward(self, batch: RunningBatch, stage: int, index: int) -> None:
        roots, grads = self._roots(batch, stage, index)
        run, params = batch.runs.pop((stage, index)), self._params(stage)
        with setting(batch.sums, takes=self._takes_early), self._model.running(run, stage):
            input_grads, param_grads = full_backward(
                roots, grads, followed(run.inputs), params, reformatted=self._reformats
            )
        batch.sums.add(params, param_grads, index, stage)
        batch.grads[stage, index] = input_grads

    def _backward_inputs(self, batch: RunningBatch, stage: int, index: int) -> None:
        roots, grads = self._roots(batch, stage, index)
        run, params = batch.runs[stage, index], self._params(stage)
        inputs = followed(run.inputs)
        with self._model.running(run, stage):
            input_grads, rest = input_backward(roots, grads, inputs, params, self._at_hand)

        def weights() -> None:
            with self._model.running(run, stage):
                batch.sums.add(params, rest(), index, stage)

        batch.halves[stage, index] = weights
        batch.grads[stage, index] = input_grads

    def _backward_weights(self, batch: RunningBatch, stage: int, index: int) -> None:
        del batch.runs[stage, index]
        batch.halves.pop((stage, index))()


def _named(wanted: Sequence[Wanted]) -> str:
    names = {name: None for one in wanted for own in one.values() for name in sorted(own)}
    return ", ".join(map(repr, list(names)[:3]))
