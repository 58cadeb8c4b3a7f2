"""What goes from stage to stage for one batch: outputs forwards, their gradients backwards.

    stage s      run.outputs ──SEND_F──> RECV_F ──> inbox["F", s + 1]
                 inbox["B", s] <── RECV_B <──SEND_B── grads[s + 1]

A neighbouring stage on the same rank finds the tensors in the batch, without a message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.pipeline_parallel.containers import signature
from lightning_shard.pipeline_parallel.gradients import GradientStash
from lightning_shard.pipeline_parallel.messages import ReceiveHandle, StageMessages, TensorMetadata
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.needs import Step
from lightning_shard.pipeline_parallel.schedules import Action, Kind
from lightning_shard.pipeline_parallel.stage_run import StageRun

LossOf = Callable[[Any], Tensor | None]


@dataclass
class RunningBatch:
    """The state of the batch that runs.

    Attributes:
        kind: Name of the kind of step.
        microbatches: The batch's microbatches, the same on every rank.
        step: Runs the user's step on a microbatch.
        trainable: Whether each parameter of this rank requires a gradient.
        stash: Sums of gradients; None in an evaluation.
        loss_of: Finds the loss in the step's result.
        runs: By stage and microbatch, the runs that are kept.
        losses: By microbatch, the weighted loss.
        inbox: Tensors or their receives, by kind ("F" or "B"), stage and microbatch.
        grads: By stage and microbatch, the gradients of the stage's inputs.
        halves: By stage and microbatch, the second half of its backward.
        results: By microbatch, the result of the step.
    """

    kind: str
    microbatches: Sequence[Microbatch]
    step: Step
    trainable: tuple[bool, ...] = ()
    stash: GradientStash | None = None
    loss_of: LossOf = lambda result: None
    runs: dict[tuple[int, int], StageRun] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    inbox: dict[tuple[str, int, int], ReceiveHandle | list[Tensor]] = field(default_factory=dict)
    grads: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # of inputs
    halves: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)


class StageTraffic:
    """Sends and receives what neighbouring stages exchange.

    Args:
        group: Group of the pipeline's ranks, in order; each must construct this.
        device: Device of this rank.
        stage_ranks: Group rank of each stage.
    """

    KINDS: ClassVar[tuple[Kind, ...]] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")

    def __init__(
        self, group: Collectives, device: torch.device, stage_ranks: Sequence[int]
    ) -> None:
        self._group, self._device, self._stage_ranks = group, device, tuple(stage_ranks)
        self._does: dict[Kind, Callable[[RunningBatch, int, int], None]] = {
            "SEND_F": self._send_outputs,
            "RECV_F": self._receive_inputs,
            "SEND_B": self._send_grads,
            "RECV_B": self._receive_grads,
        }
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what tensors are known to look like; each rank must call."""
        self._messages = StageMessages(self._group, self._device)

    def finish(self) -> None:
        """Wait until all messages of this rank have gone."""
        self._messages.finish()

    def do(self, batch: RunningBatch, action: Action) -> None:
        """Send or receive what a stage gives or is given for a microbatch."""
        self._does[action.kind](batch, action.stage, action.microbatch)

    def _key(self, batch: RunningBatch, boundary: int, microbatch: int) -> tuple[Any, ...]:
        """Return all that the metadata of the tensors at a boundary depend on."""
        content = batch.microbatches[microbatch].content
        return boundary, batch.kind, batch.trainable, signature(content)

    def _tag(self, stage: int, microbatch: int, *, is_grad: bool) -> int:
        return (microbatch * len(self._stage_ranks) + stage) * 2 + is_grad

    def _receive_inputs(self, batch: RunningBatch, stage: int, index: int) -> None:
        peer = self._stage_ranks[stage - 1]
        tag = self._tag(stage, index, is_grad=False)
        handle = self._messages.receive(peer, tag, self._key(batch, stage, index))
        batch.inbox["F", stage, index] = handle

    def _send_outputs(self, batch: RunningBatch, stage: int, index: int) -> None:
        peer = self._stage_ranks[stage + 1]
        tag = self._tag(stage + 1, index, is_grad=False)
        run, key = batch.runs[stage, index], self._key(batch, stage + 1, index)
        if run.is_skipped:
            run.outputs = self._messages.send_skipped(peer, tag, key)
        else:
            self._messages.send(run.outputs, peer, tag, key)
        if batch.stash is None:
            del batch.runs[stage, index]

    def _receive_grads(self, batch: RunningBatch, stage: int, index: int) -> None:
        peer = self._stage_ranks[stage + 1]
        tag = self._tag(stage, index, is_grad=True)
        all_metadata = [
            TensorMetadata.of(one) for one in followed(batch.runs[stage, index].outputs)
        ]
        handle = self._messages.receive_known(all_metadata, peer, tag)
        batch.inbox["B", stage, index] = handle

    def _send_grads(self, batch: RunningBatch, stage: int, index: int) -> None:
        peer = self._stage_ranks[stage - 1]
        tag = self._tag(stage - 1, index, is_grad=True)
        self._messages.send_known(batch.grads.pop((stage, index)), peer, tag)

    def inputs(
        self, batch: RunningBatch, stage: int, index: int
    ) -> tuple[list[Tensor] | None, bool]:
        """Return what a stage is given for a microbatch, and whether its sender was skipped.

        Returns:
            The tensors that the previous stage has sent, or has left in the batch on this rank;
            None for the first stage.
        """
        if stage == 0:
            return None, False
        came = batch.inbox.pop(("F", stage, index), None)
        if isinstance(came, ReceiveHandle):
            tensors = came.wait()
            return tensors, came.is_skipped
        sender = batch.runs[stage - 1, index]
        if batch.stash is None:
            del batch.runs[stage - 1, index]
        outputs = sender.outputs
        tensors = [
            one.detach().requires_grad_(TensorMetadata.of(one).requires_grad) for one in outputs
        ]
        return tensors, sender.is_skipped

    def output_grads(self, batch: RunningBatch, stage: int, index: int) -> list[Tensor]:
        """Return the gradients of a stage's outputs, from the next stage."""
        came = batch.inbox.pop(("B", stage, index), None)
        if isinstance(came, ReceiveHandle):
            return came.wait()
        return batch.grads.pop((stage + 1, index))


def followed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that require gradients."""
    return [tensor for tensor in tensors if tensor.requires_grad]
