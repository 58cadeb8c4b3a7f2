"""Values for a model on meta when a run begins: buffers at once, parameters unit by unit."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import instead
from lightning_shard.data_parallel.deferred_init.recorder import noting
from lightning_shard.data_parallel.deferred_init.tape import (
    Constant,
    Recipe,
    Tape,
    buffer_recipe,
    forget_recipes,
    has_meta_tensors,
    is_on_meta,
    note_recipe,
    recipe_of,
)
from lightning_shard.data_parallel.memory.flat_parameters import give_memory
from lightning_shard.data_parallel.memory.quantised import is_quantised
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.torch_private import INITIALISERS
from lightning_shard.errors import ConfigError, some_of


def digest(recipes: Mapping[str, Recipe | None]) -> str:
    """Return a text that differs where the values of tensors on meta, whose names are given, would.

    Constants and random states count by their bytes, files by the word "read".
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


class MetaStart:
    """Knows the values of a model's tensors that are on meta.

    Args:
        model: The model, of which no other rank has another.
        state: State of the CPU's generator at the beginning of the run, for modules that nobody
            saw being built.

    Raises:
        ConfigError: Some tensor gets no values, or was changed where nobody saw it.

    Attributes:
        split: How the model is split over ranks by the time a parameter is asked for.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, rank: int, state: Tensor | None = None
    ) -> None:
        self.device = device
        self.split: ModelSplit = Unsplit()
        self._model = model
        self._refuse_quantised(rank)
        self._note_unseen(state)
        self._check(rank)

    @classmethod
    def of(
        cls, model: nn.Module, device: torch.device, rank: int, state: Tensor | None = None
    ) -> "MetaStart | None":
        """Return what knows the values of a model; None where all tensors have theirs."""
        return cls(model, device, rank, state) if has_meta_tensors(model) else None

    def fill(self, param: nn.Parameter, target: Tensor) -> None:
        """Write the values of `param` to a tensor of its shape, in any format.

        Of a parameter of which this rank has a part, all of it is made, and given back.
        """
        recipe = recipe_of(param)
        assert recipe is not None
        if recipe.ref.size == tuple(target.shape):
            recipe.fill(target)
        else:
            target.copy_(self.split.local(param, recipe.read(recipe.ref.dtype)))

    def make(self, param: nn.Parameter) -> None:
        """Give one parameter its values now, in memory of its own; nothing if it has them."""
        if is_on_meta(param):
            value = torch.empty(param.shape, dtype=param.dtype)
            self.fill(param, value)
            give_memory(param, value.to(self.device))

    def make_buffers(self) -> None:
        """Give every buffer on meta its values."""
        made: dict[int, Tensor] = {}
        for _, module, leaf, buffer in self._buffers():
            if id(buffer) not in made:
                recipe = buffer_recipe(module, leaf, buffer)
                assert recipe is not None
                made[id(buffer)] = recipe.read(buffer.dtype).to(self.device)
            module._buffers[leaf] = made[id(buffer)]

    def make_parameters(self) -> None:
        """Give every parameter on meta its values, in memory of its own."""
        for _, param in self._params():
            self.make(param)

    def digest(self) -> str:
        """Return a text that is the same on ranks that would make the same values."""
        return digest({name: recipe for name, _, recipe in self._tensors()})

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise ConfigError for state that an optimizer has made of values that are not there."""
        for optimizer in optimizers:
            values = [one for state in optimizer.state.values() for one in state.values()]
            if any(isinstance(one, Tensor) and one.is_meta for one in values):
                raise ConfigError(
                    f"{type(optimizer).__name__} makes its state when it is constructed, but the "
                    f"parameters are on meta and have no values then; expected an optimizer that "
                    f"makes its state in the first step, such as AdamW. Build the module on the "
                    f"CPU, or take another optimizer."
                )

    def end(self) -> None:
        """Forget how the values came about, since they are there."""
        forget_recipes(self._model)

    # --- checks -----------------------------------------------------------------------------------

    def _note_unseen(self, state: Tensor | None) -> None:
        unseen = {name: tensor for name, tensor, recipe in self._tensors() if recipe is None}
        if not unseen:
            return
        note_initialisers(self._model, list(unseen.values()), state)
        rank_zero_warn(
            f"{some_of(list(unseen))} of {type(self._model).__name__} were put on meta where "
            f"nothing was noted, as by torch.device('meta') outside of configure_model. They get "
            f"the values of reset_parameters (of Hugging Face's _init_weights), layer by layer; "
            f"what an __init__ has drawn or changed besides is not done again. For the values of a "
            f"module that is built on the CPU, build it inside "
            f"trainer.init_module(empty_init=True), or in configure_model."
        )

    def _refuse_quantised(self, rank: int) -> None:
        quantised = [name for name, tensor in self._params() if is_quantised(tensor)]
        if quantised:
            raise ConfigError(
                f"Rank {rank}: {some_of(quantised)} of {type(self._model).__name__} on meta are "
                f"quantised, and their scales would be lost; expected ones with elements. Build "
                f"the quantised layers on the CPU or the GPU, as from_pretrained does."
            )

    def _check(self, rank: int) -> None:
        tensors = list(self._tensors())
        empty = [name for name, _, recipe in tensors if recipe is None or not recipe.is_written]
        if empty:
            raise ConfigError(
                f"Rank {rank}: {some_of(empty)} of {type(self._model).__name__} on meta would be "
                f"memory without values: nothing that was noted writes them, and neither does a "
                f"reset_parameters of their modules. Initialise them where the module is built, "
                f"inside trainer.init_module(empty_init=True) or in configure_model, give their "
                f"class a reset_parameters, or build it on the CPU."
            )
        changed = [
            name
            for name, tensor, recipe in tensors
            if recipe is not None and recipe.misses_changes_of(tensor)
        ]
        if changed:
            raise ConfigError(
                f"Rank {rank}: {some_of(changed)} of {type(self._model).__name__} were changed on "
                f"meta, where that does nothing, after the context in which they were built had "
                f"ended (by load_state_dict or an initialiser, say). Do it inside that context, or "
                f"in on_fit_start; load with load_state_dict(..., assign=True), load_safetensors, "
                f"or trainer.fit(ckpt_path=...)."
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor, Recipe | None]]:
        for name, param in self._params():
            yield name, param, recipe_of(param)
        for name, module, leaf, buffer in self._buffers():
            yield name, buffer, buffer_recipe(module, leaf, buffer)

    def _params(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, one) for name, one in self._model.named_parameters() if is_on_meta(one))

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        for path, module in self._model.named_modules():
            for leaf, buffer in list(module._buffers.items()):
                if buffer is not None and is_on_meta(buffer):
                    yield f"{path}.{leaf}".lstrip("."), module, leaf, buffer


def move_to(model: nn.Module, device: torch.device) -> None:
    """Bring a model's tensors to a device, but for those on meta."""
    if not has_meta_tensors(model):
        model.to(device)
        return
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None and not is_on_meta(param):
                param.data = param.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_on_meta(buffer):
                module._buffers[name] = buffer.to(device)


@contextmanager
def staying_on_meta(module: nn.Module) -> Iterator[None]:
    """Let `module.cpu()` inside leave a module alone that a failed run has left on meta."""
    if not has_meta_tensors(module):
        yield
        return
    with instead(module, "cpu", lambda _: module):
        yield


def noted_alike(start: MetaStart | None, ranks: Collectives) -> bool:
    """Whether every rank would make the same values by itself; each rank must call."""
    noted = ranks.all_gather_object("" if start is None else start.digest())
    return noted[0] != "" and len(set(noted)) == 1


def values_at_start(
    model: nn.Module,
    device: torch.device,
    rank: int,
    state: Tensor | None,
    *,
    in_full_on: Callable[[MetaStart | None], torch.device | None],
) -> MetaStart | None:
    """Give buffers on meta their values, and return who knows those of the parameters, if needed.

    `state` is the generator's when ranks have started; None for the present one. `in_full_on` is
    called on every rank with who knows the values, and returns the device on which all parameters
    get theirs now; None where that is done later.
    """
    start = MetaStart.of(model, device, rank, state)
    at_once = in_full_on(start)
    if start is None:
        return None
    start.device = device if at_once is None else at_once
    start.make_buffers()
    if at_once is None:
        return start
    start.make_parameters()
    start.end()
    return None


_HUGGING_FACE = ("transformers.modeling_utils", "PreTrainedModel")


def note_initialisers(model: nn.Module, tensors: Collection[Tensor], state: Tensor | None) -> None:
    """Leave notes at tensors on meta of what the initialisers of their modules do to them.

        children, in the order of registration        as a constructor makes them
        the module's own: reset_parameters,           of a Hugging Face model initialize_weights,
        _reset_parameters                             which calls _init_weights

    A weight that two modules share has the values of the first, as if it had been tied
    afterwards. The generator is left as it is.
    """
    tape, wanted = Tape(), {id(one) for one in tensors}
    with torch.random.fork_rng(devices=[]):
        if state is not None:
            torch.set_rng_state(state)
        holders = {
            part
            for part in model.modules()
            if any(id(one) in wanted for one in (*part.parameters(), *part.buffers()))
        }
        with _others_replaced(model, wanted), noting(tape), torch.no_grad():
            _initialise(model, holders)
    for tensor in tensors:
        note_recipe(tensor, tape)


def _initialise(module: nn.Module, holders: set[nn.Module]) -> None:
    """Do what constructors do after one another, in those modules that are left."""
    holders.discard(module)
    for child in module.children():
        if child in holders:
            _initialise(child, holders)
    initialiser = _initialiser(module)
    if initialiser is not None:
        initialiser()


def _initialiser(module: nn.Module) -> Callable[[], Any] | None:
    if any((kind.__module__, kind.__name__) == _HUGGING_FACE for kind in type(module).__mro__):
        return cast("Callable[[], Any]", module.initialize_weights)
    for name in INITIALISERS:
        method = getattr(module, name, None)
        if callable(method) and not _needs_arguments(method):
            return cast("Callable[[], Any]", method)
    return None


def _needs_arguments(method: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        one.default is inspect.Parameter.empty and one.kind not in kinds
        for one in inspect.signature(method).parameters.values()
    )


@contextmanager
def _others_replaced(model: nn.Module, wanted: Collection[int]) -> Iterator[None]:
    """Let initialisers write to stand-ins where a tensor has values, or its first module's."""
    put_back: list[tuple[dict[str, Any], str, Tensor]] = []
    seen: set[int] = set()
    tables: list[dict[str, Any]] = [
        table for one in model.modules() for table in (one._parameters, one._buffers)
    ]
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None and (id(tensor) not in wanted or id(tensor) in seen):
                put_back.append((table, name, tensor))
            seen.add(id(tensor))
    for table, name, tensor in put_back:
        stand_in = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_param = isinstance(tensor, nn.Parameter)
        table[name] = nn.Parameter(stand_in, tensor.requires_grad) if is_param else stand_in
    try:
        yield
    finally:
        for table, name, tensor in put_back:
            table[name] = tensor
