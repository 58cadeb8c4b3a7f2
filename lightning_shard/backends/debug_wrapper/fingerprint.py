"""The fingerprint of a call that a rank shows its peers, and how calls are compared by it."""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from torch import Tensor

from lightning_shard.backends.calls import Call, describe_tensor, message_key

TensorSummary = tuple[str, int, str]
"""A tensor that goes from one rank to another: dtype, number of elements, description."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A rank's call, as its peers see it.

    Attributes:
        agreed: The properties of the call that must be equal on every rank.
        operation: The call in words.
        site: File and line where the user called.
        gives: By group rank, the tensor that this rank gives to that one, where `agreed` does not
            tell.
        takes: By group rank, the tensor that this rank has room for from that one.
    """

    agreed: str
    operation: str
    site: str
    gives: dict[str, TensorSummary] = field(default_factory=dict)
    takes: dict[str, TensorSummary] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, size: int) -> Self:
        """Take the fingerprint of a call in a group of `size` ranks."""
        # A message fits its receive when the tensors do; which is which, and the peer, differ.
        agreed = call.agreed if call.tag is None else message_key(call.inputs or call.outputs)
        return cls(
            agreed=repr(agreed),
            operation=str(call),
            site=f"{call.site}{_thread_note()}",
            gives=_summaries(_given(call, size)),
            takes=_summaries(_taken(call)),
        )

    def encode(self) -> str:
        """Bring into the form that `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Read what `encode` wrote."""
        return cls(**json.loads(text))


def find_misfit(calls: Sequence[Fingerprint]) -> tuple[int, int, str] | None:
    """Return two group ranks that disagree, and on what; None when the calls fit together.

    Args:
        calls: Fingerprint of each rank's call, in rank order.
    """
    for rank, call in enumerate(calls):
        if call.agreed != calls[0].agreed:
            return rank, 0, ""
    for source, giver in enumerate(calls):
        for target, summary in giver.gives.items():
            room = calls[int(target)].takes.get(str(source))
            if room is not None and room[:2] != summary[:2]:
                what = (
                    f"rank {source} of the group gives {summary[2]}, but rank {target} of the "
                    f"group has room for {room[2]} there"
                )
                return source, int(target), what
    return None


def _given(call: Call, size: int) -> dict[int, Tensor]:
    match call.op:
        case "all_gather":
            return dict.fromkeys(range(size), call.inputs[0])
        case "gather":
            return {call.root: call.inputs[0]}
        case "scatter" | "all_to_all" | "all_to_all_single":
            return dict(enumerate(call.inputs))
    return {}


def _taken(call: Call) -> dict[int, Tensor]:
    match call.op:
        case "scatter":
            return {call.root: call.outputs[0]}
        case "all_gather" | "gather" | "all_to_all" | "all_to_all_single":
            return dict(enumerate(call.outputs))
    return {}


def _summaries(tensors: dict[int, Tensor]) -> dict[str, TensorSummary]:
    # Lists and string keys are what comes back from JSON.
    return {
        str(rank): (str(tensor.dtype), tensor.numel(), describe_tensor(tensor))
        for rank, tensor in tensors.items()
    }


def _thread_note() -> str:
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else f" in thread {thread.name!r}"
