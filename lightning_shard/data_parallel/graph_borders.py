"""The tensors that go into a block and come out of it, and hooks on the graph that tell of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_shard.data_parallel.known_modules import KnownModules

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def leaves_of(collection: Any) -> list[Any]:
    """Return what is in nested mappings, sequences and dataclasses."""
    if isinstance(collection, Tensor):
        return [collection]
    if isinstance(collection, (list, tuple)):
        children: Iterable[Any] = collection
    elif isinstance(collection, Mapping):
        children = collection.values()
    elif is_dataclass(collection):
        children = [getattr(collection, field.name) for field in fields(collection)]
    else:
        return [collection]
    return [leaf for child in children for leaf in leaves_of(child)]


def inputs_with_gradient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among a call's arguments whose gradients a backward computes."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # nearly every block's
        return [args[0]] if args[0].requires_grad else []
    return with_gradient(leaves_of((args, kwargs)))


def with_gradient(leaves: Iterable[Any]) -> list[Tensor]:
    """Return the tensors whose gradients a backward computes."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def hide_tensors(leaves: Iterable[Any]) -> bool:
    """Whether an object that we do not know may carry tensors out of a block."""
    return bool([leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))])


class LeftGraphs:
    """Looks for tensors with a graph that a forward has left on modules, as MoE routers do.

    Args:
        root: The module whose modules, itself included, are looked at.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = KnownModules(root)
        self._no_tensors: set[type] = set()  # classes of what lies on modules

    def are_there(self) -> bool:
        """Whether there is such a tensor now."""
        for module in self._modules.now():
            held = vars(module).values()
            if not self._no_tensors.issuperset(map(type, held)) and self._look(held):
                return True
        return False

    def _look(self, held: Iterable[Any]) -> bool:
        self._no_tensors.update(type(one) for one in held if not isinstance(one, Tensor))
        return any(isinstance(one, Tensor) and one.grad_fn is not None for one in held)


def on_exit(inputs: Sequence[Tensor], left: Callable[[Any], None]) -> None:
    """Call a function when a backward has computed the gradients of a block's inputs."""
    if len(inputs) == 1:  # without the objects that counting takes
        inputs[0].register_hook(left)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(inputs, left)


def on_entry(outputs: Sequence[Tensor], entered: Callable[[Any], None]) -> None:
    """Call a function when a backward enters a block, and after what waits for its gradients.

    The block after it is left by a hook of the same tensor, and is to be resharded first.

    Args:
        outputs: What the block has returned.
        entered: Called for every output whose graph is gone through.
    """
    arrived: list[None] = []

    def enter(_: Any) -> None:
        if arrived:
            arrived.clear()
            entered(_)

    def arrive(grad: Any) -> None:
        arrived.append(None)
        if has_leaf:  # which has no hook of the other kind
            enter(grad)

    if len(outputs) == 1 and outputs[0].grad_fn is not None:
        outputs[0].grad_fn.register_prehook(entered)
        return
    has_leaf = any(tensor.grad_fn is None for tensor in outputs)
    register_multi_grad_hook(outputs, arrive, mode="any")
    for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
        node.register_prehook(enter)
