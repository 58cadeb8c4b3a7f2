"""Messages of tensors between stages, whose shapes are sent once for every shape of the batch.

    new shapes       header (shapes, formats)   tensor 0   tensor 1 ...
    known shapes                                tensor 0   tensor 1 ...

All ranks of a pipeline have the same batch, so that both sides know by its shapes whether the other
one knows. Receives are posted early and sends go on while the rank computes.
"""

import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import opened, signature
from lightning_shard.pipeline_parallel.gradients import GradientStash
from lightning_shard.pipeline_parallel.microbatches import Microbatch
from lightning_shard.pipeline_parallel.needs import Step
from lightning_shard.pipeline_parallel.schedules import Kind
from lightning_shard.pipeline_parallel.stage_run import StageRun

_HEADER_BYTES = 2048  # of metadata, pickled


@dataclass(frozen=True, kw_only=True)
class TensorMetadata:
    """The properties of a tensor that its receiver must know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMetadata":
        """Return the metadata of a tensor."""
        follows = tensor.requires_grad and torch.is_grad_enabled()
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=follows)


class StageMessages:
    """Sends and receives lists of tensors between the ranks of a pipeline."""

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._known: dict[Hashable, list[TensorMetadata]] = {}  # by this rank's sends
        self._headers: dict[Hashable, _Header] = {}  # by its receives
        self._sending: list[Pending] = []

    def described(self, tensors: Sequence[Tensor], key: Hashable) -> list[Tensor]:
        """Return what is sent for tensors, their metadata first unless the receiver knows them.

        `key` determines their metadata and the boundary.
        """
        all_metadata = [TensorMetadata.of(tensor) for tensor in tensors]
        known = self._known.setdefault(key, all_metadata)
        if known != all_metadata:
            raise ConfigError(
                f"Rank {self.group.rank} of the pipeline: a stage's result looks like "
                f"{all_metadata}, expected {known} as for the last batch of these shapes. Make the "
                "shapes of activations depend on the shapes of the batch only."
            )
        header = [_header(known, self._device)] if known is all_metadata else []
        return header + [tensor.detach() for tensor in tensors]

    def send_skipped(self, peer: int, tag: int, key: Hashable) -> list[Tensor]:
        """Start to send fillers for the tensors of a step that ended before the network."""
        known = self._known.get(key)
        if known is None:
            self.send([packed(None, _HEADER_BYTES, self._device)], peer, tag)
            return []
        fillers = [self._filler(metadata) for metadata in known]
        self.send([one.detach() for one in fillers], peer, tag)
        return fillers

    def _filler(self, metadata: TensorMetadata) -> Tensor:
        """Return values that would be noticed if they were taken for results."""
        floats = metadata.dtype.is_floating_point or metadata.dtype.is_complex
        filler = self.empty(metadata).fill_(float("nan") if floats else 0)
        return filler.requires_grad_(metadata.requires_grad)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Start to send tensors whose metadata the receiver knows, or is sent before them."""
        for tensor in tensors:
            if tensor.numel():
                sent = tensor.contiguous()
                self._sending.append(self.group.send(sent, peer, tag, async_op=True))

    def receive(self, peer: int, tag: int, key: Hashable) -> "ReceiveHandle":
        """Start to receive tensors that are sent as `described`."""
        if key not in self._headers:
            self._headers[key] = self.next_header(peer, tag)
        header = self._headers[key]
        handle = ReceiveHandle(self, peer, tag, header, key)
        if header.all_metadata is not None and not header.is_skipped:
            handle.post(header.all_metadata)
        return handle

    def next_header(self, peer: int, tag: int) -> "_Header":
        """Start to receive metadata."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._device)
        return _Header(header, self.group.recv(header, peer, tag, async_op=True), tag)

    def replace_header(self, key: Hashable, old: Any, new: "_Header | None") -> None:
        """Let the next receives take their metadata from another header, or wait for one."""
        if self._headers.get(key) is old:
            del self._headers[key]
        if new is not None:
            self._headers.setdefault(key, new)

    def receive_known(
        self, all_metadata: Sequence[TensorMetadata], peer: int, tag: int
    ) -> "ReceiveHandle":
        """Start to receive tensors of these metadata."""
        handle = ReceiveHandle(self, peer, tag)
        handle.post(all_metadata)
        return handle

    def empty(self, metadata: TensorMetadata) -> Tensor:
        """Return memory for one tensor."""
        return torch.empty(metadata.shape, dtype=metadata.dtype, device=self._device)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for pending in self._sending:
            pending.wait()
        self._sending.clear()


class _Header:
    """Metadata that are on their way, or have arrived."""

    def __init__(self, packed: Tensor, pending: Pending, tag: int) -> None:
        self._packed, self._pending = packed, pending
        self.tag = tag
        self.all_metadata: Sequence[TensorMetadata] | None = None
        self.is_skipped = False

    def wait(self) -> Sequence[TensorMetadata]:
        """Wait for the metadata, and return them."""
        if self.all_metadata is None:
            self._pending.wait()
            found: list[TensorMetadata] | None = unpacked(self._packed)
            self.is_skipped, self.all_metadata = found is None, found or ()
        return self.all_metadata


class ReceiveHandle:
    """Tensors on their way; their receives are posted as soon as their metadata are known."""

    def __init__(
        self,
        messages: StageMessages,
        peer: int,
        tag: int,
        header: _Header | None = None,
        key: Hashable = None,
    ) -> None:
        self._messages, self._peer, self._tag, self._header = messages, peer, tag, header
        self._key = key
        self._coming: list[tuple[Tensor, TensorMetadata, Pending | None]] | None = None

    def post(self, all_metadata: Sequence[TensorMetadata]) -> None:
        """Post the receives of tensors of these metadata."""
        self._coming = []
        for metadata in all_metadata:
            tensor, pending = self._messages.empty(metadata), None
            if tensor.numel():
                group = self._messages.group
                pending = group.recv(tensor, self._peer, self._tag, async_op=True)
            self._coming.append((tensor, metadata, pending))

    def wait(self) -> list[Tensor]:
        """Return the tensors, which require a gradient where the sender's do."""
        if self._coming is None:
            self.post(self._all_metadata())
        assert self._coming is not None
        for tensor, metadata, pending in self._coming:
            if pending is not None:
                pending.wait()
            if metadata.requires_grad and torch.is_grad_enabled():
                tensor.requires_grad_()
        return [tensor for tensor, _, _ in self._coming]

    @property
    def is_skipped(self) -> bool:
        """Whether a skipped step's message has come, without tensors."""
        return self._header is not None and self._header.is_skipped

    def _all_metadata(self) -> Sequence[TensorMetadata]:
        """Return the metadata; after a step that was skipped, those that come with this message."""
        assert self._header is not None
        all_metadata = self._header.wait()
        while self._header.is_skipped:
            old = self._header
            if old.tag == self._tag:
                self._messages.replace_header(self._key, old, None)
                break
            self._header = self._messages.next_header(self._peer, self._tag)
            self._messages.replace_header(self._key, old, self._header)
            all_metadata = self._header.wait()
        return all_metadata


def _header(all_metadata: Sequence[TensorMetadata], device: torch.device) -> Tensor:
    header = packed(all_metadata, _HEADER_BYTES, device)
    if header.numel() > _HEADER_BYTES:
        raise ConfigError(
            f"{len(all_metadata)} tensors between two stages are too many to describe in "
            f"{_HEADER_BYTES} bytes. Give the blocks fewer tensors that are computed from "
            f"parameters."
        )
    return header


def packed(value: Any, num_bytes: int, device: torch.device) -> Tensor:
    """Return a small value as bytes that travel between stages, at least so many."""
    data = bytearray(pickle.dumps(value).ljust(num_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def unpacked(data: Tensor) -> Any:
    """Return the value that another rank has `packed`."""
    return pickle.loads(data.cpu().numpy().tobytes())


LossOf = Callable[[Any], Tensor | None]


@dataclass
class RunningBatch:
    """The state of the batch that runs, by stage and microbatch or by microbatch alone.

    Attributes:
        step: Runs the user's step on a microbatch.
        trainable: Whether each parameter of this rank requires a gradient.
        stash: Sums of gradients; None in an evaluation.
        loss_of: Finds the loss in the step's result.
        runs: The runs that are kept.
        losses: The weighted losses.
        inbox: Tensors or their receives, by kind ("F" or "B"), stage and microbatch.
        grads: Gradients of the stage's inputs.
        halves: Second halves of backwards.
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

    @property
    def sums(self) -> GradientStash:
        """Sums of gradients of a training step."""
        assert self.stash is not None
        return self.stash


StageAction = Callable[[RunningBatch, int, int], None]  # of a batch, a stage and a microbatch


class StageTraffic:
    """Sends and receives what neighbouring stages exchange, unless both are on one rank.

        stage s      run.outputs ──SEND_F──> RECV_F ──> inbox["F", s + 1]
                     inbox["B", s] <── RECV_B <──SEND_B── grads[s + 1]

    Args:
        group: Group of the pipeline's ranks, in order; each must construct this.
        device: Device of this rank.
        stage_ranks: Group rank of each stage.

    Attributes:
        actions: What sends and receives what a stage gives or is given for a microbatch.
    """

    def __init__(
        self, group: Collectives, device: torch.device, stage_ranks: Sequence[int]
    ) -> None:
        self._group, self._device, self._stage_ranks = group, device, tuple(stage_ranks)
        self.actions: dict[Kind, StageAction] = {
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

    def _key(self, batch: RunningBatch, boundary: int, microbatch: int) -> tuple[Any, ...]:
        """Return all that the metadata of the tensors at a boundary depend on."""
        content = batch.microbatches[microbatch].content
        return boundary, batch.kind, batch.trainable, signature(opened(content))

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
            self._messages.send(self._messages.described(run.outputs, key), peer, tag)
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
        self._messages.send(batch.grads.pop((stage, index)), peer, tag)

    def inputs(
        self, batch: RunningBatch, stage: int, index: int
    ) -> tuple[list[Tensor] | None, bool]:
        """Return what a stage is given for a microbatch, and whether its sender was skipped."""
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
