"""A digest of what was noted: ranks that have the same one make the same values by themselves.

name, note ─┐
operations ─┼──> blake2b      random states and constants by their bytes, files by the word "read"
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_shard.meta_start.notes import Constant
from lightning_shard.meta_start.recipes import Recipe
from lightning_shard.meta_start.tape import Tape


def digest(recipes: Mapping[str, Recipe | None]) -> str:
    """Return a text that differs where values would.

    Args:
        recipes: By the names of tensors on meta, the notes of their values.
    """
    made = blake2b(digest_size=16)
    tapes: dict[int, int] = {}
    for name, recipe in recipes.items():
        if recipe is None:
            made.update(f"{name}: none".encode())
            continue
        if id(recipe.tape) not in tapes:
            tapes[id(recipe.tape)] = len(tapes)
            for part in _of_tape(recipe.tape):
                made.update(part)
        made.update(f"{name}: {tapes[id(recipe.tape)]} {recipe.ref}".encode())
    return made.hexdigest()


def _of_tape(tape: Tape) -> Iterator[bytes]:
    for func, *given in tape.operations:
        yield (str(func) if hasattr(func, "overloadpacket") else "read").encode()
        for leaf in tree_leaves(given):
            yield from _of_leaf(leaf)


def _of_leaf(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, Constant):
        yield _content(leaf.read())
    elif isinstance(leaf, Tensor):
        yield _content(leaf)
    elif not isinstance(leaf, torch.Generator):  # whose state stands beside it
        yield repr(leaf).encode()


def _content(tensor: Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    elements: Any = raw.numpy()
    return head + blake2b(memoryview(elements)).digest()
