"""Where the calls of a group's ranks do not fit together."""

import threading
from typing import Any

import torch

from lightning_shard.backends.call_site import CallSite
from lightning_shard.backends.calls import Call, message_key
from lightning_shard.backends.debug_wrapper.bulletin import Fingerprint, find_misfit


def fingerprint(op: str, rank: int, inputs: list[int], outputs: list[int], **options: Any) -> Any:
    """Return it as a peer reads it, of a call with tensors of so many elements."""
    given, room = ([torch.empty(numel) for numel in sizes] for sizes in (inputs, outputs))
    agreed = options.pop("agreed", (op,))
    call = Call(op, rank, given, room, agreed, CallSite("a.py", 3), room, **options)
    return Fingerprint.decode(Fingerprint.of(call, 2).encode().encode())


def test_it_survives_the_journey() -> None:
    mine = fingerprint("broadcast", 0, [2], [], root=0)
    assert mine == Fingerprint(
        agreed="('broadcast',)", operation="broadcast(float32 (2,), root 0)", site="a.py:3"
    )


def test_the_first_rank_says_what_is_expected() -> None:
    calls = [fingerprint(op, 0, [1], []) for op in ("barrier", "barrier", "all_reduce")]
    assert find_misfit(calls) == (2, 0, "")
    assert find_misfit(calls[:2]) is None


def test_uneven_parts_are_compared_in_pairs() -> None:
    fitting = [
        fingerprint("all_to_all", 0, [1, 2], [1, 3]),
        fingerprint("all_to_all", 1, [3, 4], [2, 4]),
    ]
    assert find_misfit(fitting) is None
    short = [fitting[0], fingerprint("all_to_all", 1, [3, 4], [1, 4])]
    assert find_misfit(short) == (
        0,
        1,
        "rank 0 of the group gives float32 (2,), but rank 1 of the group has room for "
        "float32 (1,) there",
    )


def test_gather_and_scatter_are_compared_at_the_root() -> None:
    gather = [
        fingerprint("gather", 0, [2], [2, 3], root=0),
        fingerprint("gather", 1, [2], [], root=0),
    ]
    scatter = [
        fingerprint("scatter", 0, [2, 3], [2], root=0),
        fingerprint("scatter", 1, [], [2], root=0),
    ]
    misfit = find_misfit(gather)
    assert misfit is not None
    assert misfit[:2] == (1, 0)
    misfit = find_misfit(scatter)
    assert misfit is not None
    assert misfit[:2] == (0, 1)


def test_a_message_is_compared_by_its_tensors_alone() -> None:
    sent = fingerprint("send", 0, [2], [], agreed=("send", 1), root=1, tag=0)
    received = fingerprint("recv", 1, [], [2], agreed=("recv", 0), root=0, tag=0)
    assert sent.agreed == received.agreed == repr(message_key([torch.empty(2)]))


def test_another_thread_is_named() -> None:
    sites: list[str] = []
    thread = threading.Thread(
        target=lambda: sites.append(fingerprint("barrier", 0, [], []).site), name="loader"
    )
    thread.start()
    thread.join()
    assert sites == ["a.py:3 in thread 'loader'"]
