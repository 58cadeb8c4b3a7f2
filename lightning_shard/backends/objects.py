"""Objects as the bytes that ranks send each other: nothing is unpickled that a stranger has sent.

    numbers, text, tuples, dictionaries, ...     JSON, with a letter for what JSON does not know
    our own frozen records and enumerations      JSON: the class's name and its fields
    anything else (what a user broadcasts)       a pickle

A group's connections ask nobody who they are, and c10d's own collectives unpickle whatever comes.
So all of it bears a code that takes the job's token, which is checked before anything is read.
"""

import enum
import hmac
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends._c10d import all_gather_flat, exchange_objects_as, object_device
from lightning_shard.backends.authentication.token import remembered
from lightning_shard.errors import RankFailedError

CODE_BYTES = 32
_NO_CODE = bytes(CODE_BYTES)
_JSON, _PICKLE = b"j", b"p"
_OWN = "lightning_shard."
_PLAIN = (type(None), bool, int, float, str)
_LETTERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f", torch.Size: "z"}


class _NotPlainError(Exception):
    """An object that JSON is not for."""


def pack(obj: Any) -> bytes:
    """Return an object as bytes: 32 of the code, one that says what follows, and that."""
    try:
        content = _JSON + json.dumps(_plain(obj)).encode()
    except (_NotPlainError, RecursionError):
        content = _PICKLE + pickle.dumps(obj)
    return seal(content)


def unpack(data: bytes, whose: str) -> Any:
    """Return what `pack` has made these bytes of; `whose` names the sender for the error."""
    content = unseal(data, whose)
    if content[:1] == _PICKLE:
        return pickle.loads(content[1:])
    return _object(json.loads(content[1:]))


def seal(content: bytes) -> bytes:
    """Return the content behind its code of 32 bytes."""
    return _code(content) + content


def unseal(data: bytes, whose: str) -> bytes:
    """Return what `seal` was given; raises as `unpack` does."""
    told, content = data[:CODE_BYTES], data[CODE_BYTES:]
    if not hmac.compare_digest(told, _code(content)):
        raise RankFailedError(
            f"{whose}: got {len(data)} bytes that do not bear this job's code, expected an object "
            "that a rank of it has sent. Either the ranks have different tokens (set "
            "LIGHTNING_SHARD_JOB_TOKEN to one value), or a stranger has come into the group: keep "
            "the ranks' network private."
        )
    return content


def _code(content: bytes) -> bytes:
    token = remembered()
    if token is None:  # threads of one process, or groups that this package has not made
        return _NO_CODE
    return hmac.digest(token.encode(), b"lightning-shard object\0" + content, "sha256")


def _plain(obj: Any) -> Any:
    """Return what JSON holds in the object's place: itself, or a list that begins with a letter."""
    kind = type(obj)
    if kind in _PLAIN:
        return obj
    if (letter := _LETTERS.get(kind)) is not None:
        return [letter, *map(_plain, obj)]
    if kind is dict:
        return ["d", *([_plain(key), _plain(value)] for key, value in obj.items())]
    if kind is bytes:
        return ["b", obj.decode("latin-1")]
    if kind in (torch.dtype, torch.device):
        return ["v" if kind is torch.device else "y", str(obj).removeprefix("torch.")]
    if kind.__module__.startswith(_OWN) and "<" not in kind.__qualname__:
        return ["c", kind.__module__, kind.__qualname__, *_fields(obj)]
    raise _NotPlainError


def _fields(obj: Any) -> list[Any]:
    if isinstance(obj, enum.Enum):
        return [obj.name]
    if is_dataclass(obj):
        return [[one.name, _plain(getattr(obj, one.name))] for one in fields(obj)]
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return list(map(_plain, obj))
    raise _NotPlainError


def _object(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    letter, *rest = plain
    return _MAKERS[letter](rest)


def _made_dtype(rest: list[Any]) -> torch.dtype:
    made = getattr(torch, rest[0])
    assert isinstance(made, torch.dtype)
    return made


def _made_record(rest: list[Any]) -> Any:
    """Return an object of a class of this package, which is imported already."""
    module, name, *content = rest
    assert module.startswith(_OWN)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]
    assert isinstance(found, type)
    if issubclass(found, enum.Enum):
        return found[content[0]]
    if issubclass(found, tuple):
        return found(*map(_object, content))
    assert is_dataclass(found)
    made = object.__new__(found)
    for field, value in content:
        object.__setattr__(made, field, _object(value))
    return made


_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "l": lambda rest: [_object(one) for one in rest],
    "t": lambda rest: tuple(_object(one) for one in rest),
    "s": lambda rest: {_object(one) for one in rest},
    "f": lambda rest: frozenset(_object(one) for one in rest),
    "z": torch.Size,
    "d": lambda rest: {_object(key): _object(value) for key, value in rest},
    "b": lambda rest: rest[0].encode("latin-1"),
    "y": _made_dtype,
    "v": lambda rest: torch.device(rest[0]),
    "c": _made_record,
}


def guard_torch() -> None:
    """Have c10d's own object collectives unpickle nothing that bears no code of this job."""
    exchange_objects_as(pack, partial(unpack, whose="An object collective of torch"))


def gather_objects(group: dist.ProcessGroup, obj: Any) -> list[Any]:
    """Return the objects of all ranks of a group, each of which must call, in their order."""
    device, num_ranks = object_device(group), group.size()
    own = _bytes(pack(obj), device)
    own_size = torch.tensor([own.numel()], dtype=torch.long, device=device)
    sizes = own_size.new_empty(num_ranks)
    all_gather_flat(sizes, own_size, group=group)
    num_bytes = sizes.tolist()
    padded = own.new_zeros(max(num_bytes))  # (longest,)
    padded[: own.numel()] = own
    gathered = padded.new_empty(num_ranks * padded.numel())
    all_gather_flat(gathered, padded, group=group)
    return [
        _received_object(data[:size], group, "all_gather_object", rank)
        for rank, (data, size) in enumerate(
            zip(gathered.view(num_ranks, -1), num_bytes, strict=True)
        )
    ]


def broadcast_object(group: dist.ProcessGroup, obj: Any, src: int) -> Any:
    """Return the object of the group's rank `src`; every rank of the group must call."""
    device = object_device(group)
    data = _bytes(pack(obj) if group.rank() == src else b"", device)
    size = torch.tensor([data.numel()], dtype=torch.long, device=device)
    dist.broadcast(size, group=group, group_src=src)
    if group.rank() != src:
        data = data.new_empty(int(size))
    dist.broadcast(data, group=group, group_src=src)
    return _received_object(data, group, "broadcast_object", src)


def _bytes(data: bytes, device: torch.device) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _received_object(data: Tensor, group: dist.ProcessGroup, operation: str, source: int) -> Any:
    whose = f"Rank {group.rank()} of {group.size()} in {operation}, from rank {source}"
    return unpack(data.cpu().numpy().tobytes(), whose)
