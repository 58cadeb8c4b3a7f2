"""The bytes that a rank holds, counted by storage: what is allocated, not what ought to be."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_entries import of_parameters, tensors_of
from lightning_shard.data_parallel.torch_private import storage_key


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes of one rank between two steps, by kind.

    Attributes:
        parameters: Parameters, master copies included.
        offloaded: Host memory besides, under offload.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    offloaded: int = 0

    @property
    def total(self) -> int:
        """Sum of the three counts, in bytes: without `offloaded`."""
        return self.parameters + self.gradients + self.optimizer_state


def expected(engine: DataParallelEngine) -> HeldBytes:
    """Return what this rank will hold between training steps, without optimizer state."""
    params = gradients = offloaded = 0
    for flat in engine.flats:
        master = flat.shard.numel() * flat.master_dtype.itemsize
        is_apart = (flat.is_rounded or flat.reshards) and not flat.is_away
        is_whole = not flat.reshards and flat.common is None
        params += flat.full.numel() * flat.full.itemsize if is_whole else 0
        params += flat.known_bytes
        params += flat.shard.numel() * flat.shard.itemsize if is_apart or flat.common else 0
        if flat.is_trained and flat.stage < 2:  # micro-batches add up there
            gradients += flat.full.numel() * flat.master_dtype.itemsize
        elif flat.is_trained and flat.host is None:
            gradients += master
        if flat.host is not None:
            offloaded += 2 * master if flat.is_trained else master
    return HeldBytes(parameters=params, gradients=gradients, optimizer_state=0, offloaded=offloaded)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of `tensors`: views and ties count once."""
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def held(engine: DataParallelEngine, optimizers: Iterable[Optimizer]) -> HeldBytes:
    """Return what this rank holds now."""
    on_host = {param for flat in engine.flats if flat.host is not None for param in flat.params}
    state: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether it is offloaded
    for param, entries in chain.from_iterable(map(of_parameters, optimizers)):
        state[param in on_host] += tensors_of(entries)
    offloaded = [flat.host.tensor for flat in engine.flats if flat.host is not None]
    offloaded += [t for one in engine.gradients for t in one.buffer.host_buffers()]
    return HeldBytes(
        parameters=sum(flat.known_bytes for flat in engine.flats)
        + sum(flat.shard.nbytes for flat in engine.flats if flat.common is not None)
        + storage_bytes(
            t
            for flat in engine.flats
            if flat.common is None
            for t in ((flat.full,) if flat.is_away else (flat.full, flat.shard))
        ),
        gradients=storage_bytes(t for one in engine.gradients for t in one.buffers()),
        optimizer_state=storage_bytes(state[False]),
        offloaded=storage_bytes([*offloaded, *state[True]]),
    )


def replicated(engine: DataParallelEngine, optimizers: Iterable[Optimizer]) -> HeldBytes:
    """Return what a rank would hold if every rank held everything; each rank must call."""
    params = gradients = 0
    growth: dict[Tensor, float] = {}  # from this rank's part of a parameter to the full one
    for flat in engine.flats:
        numel = 0
        for param, slot in zip(flat.params, flat.layout.slots, strict=True):
            if not engine.split.counts(param):
                continue
            shape = engine.split.full_shapes.get(param)
            full = slot.numel if shape is None else shape.numel()
            is_gathered = param in engine.owners.of_parts  # its state is full, on one rank
            growth[param] = 1.0 if is_gathered else full / max(slot.numel, 1)
            numel += full
        params += numel * flat.full.element_size()
        params += numel * flat.master_dtype.itemsize if flat.full.dtype != flat.master_dtype else 0
        gradients += numel * flat.full.element_size() if flat.is_trained else 0
    states: dict[bool, int] = {True: 0, False: 0}  # by whether parts are gathered
    for stepped, entries in chain.from_iterable(map(of_parameters, optimizers)):
        for value in tensors_of(entries) if stepped in growth else ():
            full = round(value.nbytes * (growth[stepped] if value.ndim else 1))
            states[stepped in engine.owners.of_parts] += full
    gathered, state = states[True], states[False]
    if engine.split.parts is not None and engine.options.owned:
        gathered = sum(engine.split.parts.group.all_gather_object(gathered))
    state += gathered
    if engine.options.stage > 0:
        state = sum(engine.groups.shard.all_gather_object(state))
    for group in engine.split.groups_of_layers:
        sums = zip(*group.all_gather_object((params, gradients, state)), strict=True)
        params, gradients, state = (sum(one) for one in sums)
    return HeldBytes(parameters=params, gradients=gradients, optimizer_state=state)
