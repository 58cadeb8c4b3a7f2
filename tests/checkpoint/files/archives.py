"""A small checkpoint, and ways to damage the file that it is in."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn


def checkpoint() -> dict[str, Any]:
    """Return what Lightning would save of a small model, with Adam's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    return {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 3,
    }


def damage(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return what was done to a file, and its content then."""
    where = rng.randrange(len(content))
    kind = rng.choice(["flip a bit", "set a byte", "cut off", "zero a range", "drop a range"])
    changed = bytearray(content)
    length = rng.choice([1, 4, 12, 64, 500])
    if kind == "flip a bit":
        changed[where] ^= 1 << rng.randrange(8)
    elif kind == "set a byte":
        changed[where] = rng.randrange(256)
    elif kind == "cut off":
        del changed[where:]
    elif kind == "zero a range":
        changed[where : where + length] = bytes(len(changed[where : where + length]))
    else:
        del changed[where : where + length]
    return f"{kind} at {where}, length {length}", bytes(changed)


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints are the same to the bit."""
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and torch.equal(one, other)
    if isinstance(other, dict):
        return (
            isinstance(one, dict)
            and list(one) == list(other)
            and all(same(one[key], value) for key, value in other.items())
        )
    if isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def with_other_writer(path: Path, content: dict[str, Any], **options: Any) -> Path:
    """Save as torch does, and so as Lightning does."""
    torch.save(content, path, **options)
    return path
