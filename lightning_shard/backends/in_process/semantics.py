"""The arithmetic of each collective, given the calls of all ranks in rank order.

The last rank to call runs these on everybody's tensors. Sources that lie in the storage of a
target are copied first, so that an all-gather from a slice of its own output, and every other way
to alias, is right. Each reads everything that must agree between pairs of ranks before it writes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_shard.backends.c10d_reduce_ops import reduce_tensors
from lightning_shard.backends.calls import Call, Disagreement, describe_tensor
from lightning_shard.backends.packing import raw, unaliased, write

Calls = Sequence[Call]


def _all_reduce(calls: Calls) -> None:
    for parts in zip(*(call.inputs for call in calls), strict=True):
        total = reduce_tensors([raw(part) for part in parts], calls[0].reduce_op)
        for part in parts:
            write(part, total)


def _reduce(calls: Calls) -> None:
    root = calls[calls[0].root]
    for k, target in enumerate(root.inputs):
        write(target, reduce_tensors([raw(call.inputs[k]) for call in calls], root.reduce_op))


def _broadcast(calls: Calls) -> None:
    root = calls[calls[0].root]
    for call in calls:
        if call is not root:
            for target, source in zip(call.inputs, root.inputs, strict=True):
                write(target, raw(source))


def _all_gather(calls: Calls) -> None:
    for call in calls:
        for slot, source in zip(call.outputs, calls, strict=True):
            _check_numel(call, slot, source, source.inputs[0])
    targets = [slot for call in calls for slot in call.outputs]
    sources = unaliased([call.inputs[0] for call in calls], targets)
    for call in calls:
        for slot, part in zip(call.outputs, sources, strict=True):
            write(slot, part)


def _all_gather_single(calls: Calls) -> None:
    targets = [output for call in calls for output in call.outputs]
    for k in range(len(calls[0].inputs)):
        sources = unaliased([call.inputs[k] for call in calls], targets)
        gathered = torch.cat([source.reshape(-1) for source in sources])
        for call in calls:
            write(call.outputs[k], gathered)


def _reduce_scatter(calls: Calls) -> None:
    for call in calls:
        _check_numel(call, call.outputs[0], call, call.inputs[call.rank])
    parts = zip(*(call.inputs for call in calls), strict=True)
    totals = [reduce_tensors([raw(t) for t in part], calls[0].reduce_op) for part in parts]
    for call in calls:
        write(call.outputs[0], totals[call.rank])


def _reduce_scatter_single(calls: Calls) -> None:
    totals = [
        reduce_tensors([raw(part) for part in parts], calls[0].reduce_op).reshape(len(calls), -1)
        for parts in zip(*(call.inputs for call in calls), strict=True)
    ]
    for call in calls:
        for output, total in zip(call.outputs, totals, strict=True):
            write(output, total[call.rank])


def _gather(calls: Calls) -> None:
    root = calls[calls[0].root]
    for slot, source in zip(root.outputs, calls, strict=True):
        _check_numel(root, slot, source, source.inputs[0])
    sources = unaliased([call.inputs[0] for call in calls], root.outputs)
    for slot, part in zip(root.outputs, sources, strict=True):
        write(slot, part)


def _scatter(calls: Calls) -> None:
    root = calls[calls[0].root]
    for call, source in zip(calls, root.inputs, strict=True):
        _check_numel(call, call.outputs[0], root, source)
    sources = unaliased(root.inputs, [call.outputs[0] for call in calls])
    for call, part in zip(calls, sources, strict=True):
        write(call.outputs[0], part)


def _all_to_all(calls: Calls) -> None:
    for call in calls:
        for slot, sender in zip(call.outputs, calls, strict=True):
            _check_numel(call, slot, sender, sender.inputs[call.rank])
    targets = [slot for call in calls for slot in call.outputs]
    sources = {call.rank: unaliased(call.inputs, targets) for call in calls}
    for call in calls:
        for slot, sender in zip(call.outputs, calls, strict=True):
            write(slot, sources[sender.rank][call.rank])


def _barrier(calls: Calls) -> None:
    del calls


def _check_numel(receiver: Call, slot: Tensor, sender: Call, source: Tensor) -> None:
    if slot.numel() != source.numel() or slot.dtype != source.dtype:
        raise Disagreement(
            sender,
            receiver,
            f"rank {sender.rank} of the group gives {describe_tensor(source)}, but rank "
            f"{receiver.rank} of the group has room for {describe_tensor(slot)} there",
        )


SEMANTICS: dict[str, Callable[[Calls], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
}
