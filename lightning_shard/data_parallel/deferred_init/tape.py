"""A tape: what was done to tensors without elements, which can be done for good later.

    weight = empty(4, 4)        0   empty -> A
    weight.uniform_()           1   uniform_(A)     generator as it was      left out: see 3
    mask = ones(4, 4).tril()    2   ones -> B, tril(B) -> C
    weight.normal_()            3   normal_(A)      generator as it was
    weight.mul_(0.5)            4   mul_(A)         value(A) does 3 and 4, value(C) does 2

A tensor on meta is known by its storage and by how it lies in it, so views, ties and copies are
what they would be. Each draw is done once when it is noted, on memory that is given back, so that
the generator goes on from where it would be. Values that code asks for at once are computed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.core.tensor_calls import written_by
from lightning_shard.data_parallel.torch_private import storage_key
from lightning_shard.errors import ConfigError

_SMALL_BYTES = 1 << 20  # copied at once, where a larger tensor is kept as it is
_aten = torch.ops.aten
_EMPTY = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted),
    *(_aten.new_empty, _aten.new_empty_strided),
}
_FILLING = {
    *(_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.random_),
    *(_aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_, _aten.bernoulli_),
}
_DRAWN_BY_SIZE = {*_FILLING, _aten.rand_like, _aten.randn_like, _aten.randint_like}
_META = torch.device("meta")


@dataclass(frozen=True)
class Ref:
    """A tensor without elements: how it lies in which storage of its tape."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def inside(self, memory: Tensor) -> Tensor:
        """Return the tensor in memory, which is the storage's bytes; shape (bytes,), uint8."""
        first = memory.storage_offset() // self.dtype.itemsize + self.offset
        storage = memory.untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, first, self.size, self.stride)

    def scratch(self) -> Tensor:
        """Return a tensor of the same form, of zeros."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return made.zero_()


@dataclass(frozen=True)
class Constant:
    """A tensor with elements that an operation reads."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Constant":
        """Take a tensor as it is now."""
        is_small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        value = tensor.clone() if is_small else tensor
        return cls(value, value._version)

    def read(self) -> Tensor:
        """Return it."""
        if self.tensor._version != self.version:
            raise ConfigError(
                f"A tensor of shape {tuple(self.tensor.shape)} was copied into a module on meta "
                f"and changed since; expected it as it was, for it is read when the ranks make "
                f"their shards. Copy in a clone of it."
            )
        return self.tensor


@dataclass(frozen=True)
class Node:
    """One operation on tensors with and without elements.

    Attributes:
        func: What is called; None for memory that nobody has written.
        args: Its arguments, with notes in the place of tensors.
        outs: The tensors that it returns in new storages, by their place in the flat result.
        fills: The storage whose every element it writes without reading it; None where there is
            none.
        state: The generator's state before it; None if nothing is drawn.
        default_dtype: Format of new tensors then, where nothing else says it.
    """

    func: Callable[..., Any] | None
    args: Any
    kwargs: Mapping[str, Any]
    reads: frozenset[int]
    outs: tuple[tuple[int, Ref], ...] = ()
    writes: tuple[Ref, ...] = ()
    fills: int | None = None
    state: Tensor | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    def needs(self) -> frozenset[int]:
        """Storages whose content it needs."""
        return self.reads - {self.fills}

    def call(self, memory: Mapping[int, Tensor]) -> Any:
        """Do it on tensors with elements."""

        def real(note: Any) -> Any:
            return note.inside(memory[note.storage]) if isinstance(note, Ref) else note.read()

        args, kwargs = tree_map_only((Ref, Constant), real, (self.args, dict(self.kwargs)))
        if self.state is not None:
            _set_state(kwargs, self.state)
        assert self.func is not None
        with _default_dtype(self.default_dtype):
            return self.func(*args, **kwargs)


def ref_of(tensor: Tensor, number: int) -> Ref:
    """Return the note of a tensor on meta whose storage has a number."""
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            "A lazily conjugated or negated tensor on meta cannot be made later; expected a plain "
            "one. Call resolve_conj() or resolve_neg() where the module is built."
        )
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Ref(number, tensor.dtype, size, stride, int(tensor.storage_offset()))


def bytes_of(ref: Ref) -> int:
    """Return the bytes of a tensor's elements."""
    return prod(ref.size) * ref.dtype.itemsize


def covers(ref: Ref, nbytes: int) -> bool:
    """Whether a tensor is all of its storage, each element once."""
    return ref.offset == 0 and bytes_of(ref) == nbytes and 0 not in ref.stride


def draw(node: Node, memory: Mapping[int, Tensor] | None = None) -> None:
    """Let the generator go on as if the operation were done."""

    def scratch(note: Any) -> Tensor:
        if isinstance(note, Constant):
            return note.read()
        known = None if memory is None else memory.get(note.storage)
        found: Tensor = note.scratch() if known is None else note.inside(known)
        return found

    args, kwargs = tree_map_only((Ref, Constant), scratch, (node.args, dict(node.kwargs)))
    assert node.func is not None
    node.func(*args, **kwargs)


def _set_state(kwargs: dict[str, Any], state: Tensor) -> None:
    if kwargs.get("generator") is None:
        torch.set_rng_state(state)
    else:
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class _Storage:
    """A storage without memory, held so that no other gets its address.

    Attributes:
        writers: Numbers of the operations that make or change its content.
    """

    held: Any
    nbytes: int
    writers: list[int] = field(default_factory=list)


class Tape(SharedByCopies):
    """Notes operations on meta tensors, and does them on memory."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}
        self._left: dict[int, Any] = {}  # storages of which nothing is noted
        self._at_hand: dict[int, tuple[Tensor, int]] = {}  # what code has asked for, and when

    @property
    def operations(self) -> Iterator[tuple[Any, ...]]:
        """The operations that were noted: what is called, with what, from which random state."""
        for node in self._nodes:
            yield node.func, node.args, node.kwargs, node.outs, node.state, node.default_dtype

    def forget_values(self) -> None:
        """Give back the memory of values that code has asked for."""
        self._at_hand.clear()

    def leave(self, tensor: Tensor) -> Tensor:
        """Note nothing of a tensor, which the code itself has on meta, and return it."""
        self._left[storage_key(tensor)] = tensor.untyped_storage()
        return tensor

    def leaves(self, tensor: Tensor) -> bool:
        """Whether nothing is noted of a meta tensor."""
        if not self._left:
            return False
        try:
            return storage_key(tensor) in self._left
        except (NotImplementedError, RuntimeError, ValueError):  # it has no storage of its own
            return False

    def ref(self, tensor: Tensor) -> Ref | None:
        """Return the note of a meta tensor; None for one whose memory nothing here has made."""
        number = self._numbers.get(storage_key(tensor))
        return None if number is None else ref_of(tensor, number)

    def is_made(self, tensor: Tensor) -> bool:
        """Whether something here has made a meta tensor's memory, or has written to it."""
        ref = self.ref(tensor)
        return ref is not None and bool(self._storages[ref.storage].writers)

    def is_written(self, ref: Ref) -> bool:
        """Whether all of the tensor's memory has got values, at once or in parts."""
        storage = self._storages[ref.storage]
        nodes = [self._nodes[number] for number in storage.writers]
        done = [node for node in nodes if node.func is not None]
        if any(one.storage == ref.storage for node in done for _, one in node.outs):
            return True
        parts = {one for node in done for one in node.writes if one.storage == ref.storage}
        return sum(map(bytes_of, parts)) >= min(storage.nbytes, bytes_of(ref))

    # --- noting -----------------------------------------------------------------------------------

    def do(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation without elements, and note it; at once where nothing is on meta."""
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        on_meta = any(one.is_meta for one in tensors)
        if not on_meta and kwargs.get("device") != _META:
            return func(*args, **kwargs)
        if on_meta and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        written = written_by(func, args, kwargs)
        if _answers(func) or any(not one.is_meta for one in written):
            return self._do_now(func, args, kwargs)
        try:
            result = func(*_on_meta(args), **_on_meta(kwargs))
        except NotImplementedError:
            if written:
                raise
            return self._do_now(func, args, kwargs)
        self._note(func, args, kwargs, written, result)
        return result

    def note_read(self, target: Tensor, read: Callable[[], Tensor]) -> None:
        """Note that all of a meta tensor, which lies without gaps, is read from elsewhere."""
        ref = self._noted(target)
        made = ((0, ref),)  # what is read is the tensor's memory: no second one is made
        self._add(Node(read, (), {}, frozenset(), made, (ref,), self._filled(ref)))

    def _filled(self, ref: Ref) -> int | None:
        """Return the storage of a tensor that is all of it; None for a part."""
        return ref.storage if covers(ref, self._storages[ref.storage].nbytes) else None

    def _note(
        self, func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Tensor], result: Any
    ) -> None:
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _state(kwargs)
        # a view of what nothing here has made has no values, and what is written is no new tensor
        is_new = not any(one.alias_info for one in func._schema.returns)
        fresh = [
            (place, one)
            for place, one in enumerate(tree_leaves(result))
            if is_new and isinstance(one, Tensor) and one.is_meta and self.ref(one) is None
        ]
        if not fresh and not written and state is None:
            return  # a view
        noted = tree_map_only(Tensor, self._noted_or_constant, (tuple(args), kwargs))
        refs = [one for one in tree_leaves(noted) if isinstance(one, Ref)]
        writes = tuple(map(self._noted, written))
        node = Node(
            None if func.overloadpacket in _EMPTY else func,
            noted[0],
            {**noted[1], **({"device": torch.device("cpu")} if "device" in kwargs else {})},
            frozenset(one.storage for one in refs),
            tuple((place, self._noted(one)) for place, one in fresh),
            writes,
            self._filled(writes[0]) if func.overloadpacket in _FILLING else None,
            state,
        )
        if state is not None:
            self._draw(node)
        self._add(node)

    @torch.no_grad()
    def _draw(self, node: Node) -> None:
        """Let the generator go on as if an operation were done: some draw as their values ask."""
        memory: dict[int, Tensor] | None = None
        packet = getattr(node.func, "overloadpacket", None)
        if packet not in _DRAWN_BY_SIZE and node.needs:
            memory = {}
            with torch.random.fork_rng(devices=[]):
                self._run(dict.fromkeys(node.needs, len(self._nodes)), memory)
        draw(node, memory)

    def _add(self, node: Node) -> None:
        changed = [*(ref.storage for ref in node.writes), *(ref.storage for _, ref in node.outs)]
        for storage in dict.fromkeys(changed):
            self._storages[storage].writers.append(len(self._nodes))
        self._nodes.append(node)

    def _noted(self, tensor: Tensor) -> Ref:
        ref = self.ref(tensor)
        if ref is None:
            held = tensor.untyped_storage()
            self._numbers[storage_key(tensor)] = len(self._storages)
            self._storages.append(_Storage(held, held.nbytes()))
            ref = self.ref(tensor)
        assert ref is not None
        return ref

    def _noted_or_constant(self, tensor: Tensor) -> Ref | Constant:
        return self._noted(tensor) if tensor.is_meta else Constant.of(tensor)

    # --- doing ------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, ref: Ref, target: Tensor) -> None:
        """Write the values of a noted tensor to one of its shape, of any format and on any device.

        Contiguous memory on the CPU in the tensor's own format is written in place.
        """
        nbytes = self._storages[ref.storage].nbytes
        in_place = target.dtype == ref.dtype and target.device.type == "cpu"
        in_place = in_place and target.is_contiguous() and covers(ref, nbytes)
        in_place = in_place and ref.stride == target.stride()
        memory: dict[int, Tensor] = {}
        if in_place:
            memory[ref.storage] = target.detach().view(-1).view(torch.uint8)
        with torch.random.fork_rng(devices=[]):
            self._run({ref.storage: len(self._nodes)}, memory)
        if not in_place:
            target.copy_(ref.inside(memory[ref.storage]))

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a meta tensor, in memory of its own."""
        value: Tensor = self._do_now(_aten.clone.default, (tensor,), {})
        return value

    @torch.no_grad()
    def _do_now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation on values, which are computed for it."""
        noted = tree_map_only(Tensor, self._noted_or_self, (tuple(args), kwargs))
        wanted = {one.storage for one in tree_leaves(noted) if isinstance(one, Ref)}
        memory: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            self._run(dict.fromkeys(wanted, len(self._nodes)), memory, keep=True)
        self._at_hand = {one: (memory[one], len(self._nodes)) for one in wanted}
        real = tree_map_only(Ref, lambda one: one.inside(memory[one.storage]), noted)
        if kwargs.get("device") == _META:
            real[1]["device"] = torch.device("cpu")
        return func(*real[0], **real[1])

    def _noted_or_self(self, tensor: Tensor) -> Any:
        return self._noted(tensor) if tensor.is_meta else tensor

    def _run(
        self, wanted: Mapping[int, int], memory: dict[int, Tensor], *, keep: bool = False
    ) -> None:
        """Do what gives storages their content.

        Args:
            wanted: By storage, the number of the operation before which its content is wanted.
            memory: The storages' bytes, which grow; those that are there are written in place.
            keep: Whether the memory of other storages stays, and that of earlier calls is used.
        """
        needed = sorted(self._needed(wanted, memory if keep else None))
        last = {one: number for number in needed for one in self._nodes[number].reads}
        for number in needed:
            node = self._nodes[number]
            self._run_node(node, memory)
            for storage in () if keep else node.reads:
                if last[storage] == number and storage not in wanted:
                    del memory[storage]

    def _needed(self, wanted: Mapping[int, int], memory: dict[int, Tensor] | None) -> set[int]:
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()
        todo = list(wanted.items())
        while todo:
            storage, before = todo.pop()
            since = self._take_at_hand(storage, before, memory)
            writers = [one for one in self._storages[storage].writers if since <= one < before]
            if not writers and not since:
                raise _unknown(self._storages[storage].nbytes)
            for number in reversed(writers):
                if (storage, number) in seen:
                    break
                seen.add((storage, number))
                found.add(number)
                node = self._nodes[number]
                todo += [(one, number) for one in node.needs - {storage}]
                if node.fills == storage:
                    found.update(self._maker(storage) if storage in node.reads else ())
                    break
        return found

    def _take_at_hand(self, storage: int, before: int, memory: dict[int, Tensor] | None) -> int:
        """Use a value that was asked for; return the number from which operations are missing."""
        kept = self._at_hand.get(storage)
        if memory is None or kept is None:
            return 0
        if any(before <= one < kept[1] for one in self._storages[storage].writers):
            return 0
        memory[storage] = kept[0]
        return kept[1]

    def _maker(self, storage: int) -> Iterator[int]:
        """Yield the operation that makes a storage empty: its memory is needed, no content."""
        first = self._storages[storage].writers[0]
        if self._nodes[first].func is None:
            yield first

    def _run_node(self, node: Node, memory: dict[int, Tensor]) -> None:
        for storage in node.reads - memory.keys():  # written before anything has made it
            memory[storage] = self._bytes(storage)
        if node.func is None:
            for _, ref in node.outs:
                if ref.storage not in memory:
                    memory[ref.storage] = self._bytes(ref.storage)
            return
        result = tree_leaves(node.call(memory))
        for place, ref in node.outs:
            self._take(ref, result[place], memory)

    def _take(self, ref: Ref, made: Tensor, memory: dict[int, Tensor]) -> None:
        fits = made.stride() == ref.stride and made.storage_offset() == ref.offset
        fits = fits and made.dtype == ref.dtype and made.device.type == "cpu"
        fits = fits and made.untyped_storage().nbytes() == self._storages[ref.storage].nbytes
        if ref.storage not in memory and fits:
            memory[ref.storage] = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
            return
        if ref.storage not in memory:
            memory[ref.storage] = self._bytes(ref.storage)
        ref.inside(memory[ref.storage]).copy_(made)

    def _bytes(self, storage: int) -> Tensor:
        return torch.empty(self._storages[storage].nbytes, dtype=torch.uint8)


def _unknown(nbytes: int) -> ConfigError:
    return ConfigError(
        f"A module on meta was computed from a tensor on meta ({nbytes} bytes) that was made "
        f"elsewhere, so that its values are not known; expected all of it to be made in one "
        f"context. Make both inside trainer.init_module(empty_init=True), or in configure_model."
    )


def _answers(func: Any) -> bool:
    """Whether an operation returns numbers, for which it needs elements."""
    returned = [str(one.type) for one in func._schema.returns]
    return bool(returned) and not any("Tensor" in one for one in returned)


def _on_meta(nested: Any) -> Any:
    """Return arguments whose tensors have no elements; numbers in tensors stay."""

    def without(tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.ndim == 0:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)

    return tree_map_only(Tensor, without, nested)


def _state(kwargs: Mapping[str, Any]) -> Tensor:
    generator = kwargs.get("generator")
    return torch.get_rng_state() if generator is None else generator.get_state()


# --- notes at tensors -----------------------------------------------------------------------------

_ATTRIBUTE = "_lightning_shard_values"  # set on tensors and modules


@dataclass(frozen=True)
class Recipe(SharedByCopies):
    """A note of a tensor's values, on a tape.

    A parameter keeps it as an attribute, which casts (`module.half()`) and the copies that ranks of
    one process are given leave there; a cast buffer is another tensor, so its module keeps it, too.

    Attributes:
        tensor_id: The `id` of the tensor that the note was left at; a copy of it has another.
        version: The tensor's own count of changes then: later ones are on no tape.
    """

    tape: Tape
    ref: Ref
    tensor_id: int
    version: int

    @property
    def is_written(self) -> bool:
        """Whether there are values."""
        return self.tape.is_written(self.ref)

    def misses_changes_of(self, tensor: Tensor) -> bool:
        """Whether the tensor was changed after its note was left."""
        return self.tensor_id == id(tensor) and self.version != tensor._version

    def fill(self, target: Tensor) -> None:
        """Write the values to a tensor of the same shape."""
        self.tape.fill(self.ref, target)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the values in new memory, in this format."""
        made = torch.empty(self.ref.size, dtype=dtype)
        self.fill(made)
        return made


def is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no elements."""
    return not is_lazy(tensor) and tensor.is_meta


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers without elements."""
    return any(map(is_on_meta, (*module.parameters(), *module.buffers())))


def note_recipes(modules: Iterable[nn.Module], tape: Tape) -> None:
    """Leave notes at the meta tensors of modules, and of their parts, that are on a tape."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    for part in parts:
        for param in part._parameters.values():
            if param is not None and is_on_meta(param):
                note_recipe(param, tape)
        for name, buffer in _own_buffers(part):
            note_recipe(buffer, tape)
            recipe = recipe_of(buffer)
            if recipe is not None:
                vars(part).setdefault(_ATTRIBUTE, {})[name] = recipe


def note_recipe(tensor: Tensor, tape: Tape) -> None:
    """Leave a note at a meta tensor that is on a tape."""
    ref = tape.ref(tensor)
    if ref is not None:
        vars(tensor)[_ATTRIBUTE] = Recipe(tape, ref, id(tensor), tensor._version)


def recipe_of(tensor: Tensor) -> Recipe | None:
    """Return the note at a tensor; None without one."""
    recipe: Recipe | None = vars(tensor).get(_ATTRIBUTE)
    return recipe


def buffer_recipe(module: nn.Module, name: str, buffer: Tensor) -> Recipe | None:
    """Return the note of a module's own buffer; None without one."""
    recipe: Recipe | None = vars(module).get(_ATTRIBUTE, {}).get(name)
    own = recipe_of(buffer)
    if own is not None or recipe is None or recipe.ref.size != tuple(buffer.shape):
        return own
    return recipe


def forget_recipes(module: nn.Module) -> None:
    """Remove all notes of a module that has its values."""
    for part in module.modules():
        vars(part).pop(_ATTRIBUTE, None)
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                vars(tensor).pop(_ATTRIBUTE, None)


def _own_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and is_on_meta(buffer):
            yield name, buffer
