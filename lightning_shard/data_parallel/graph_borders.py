"""The tensors that go into a block and come out of it, and hooks on the graph that tell of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, register_multi_grad_hook

from lightning_shard.core.states import Asker, asker, having
from lightning_shard.data_parallel.torch_private import children_of


class KnownModules:
    """All modules of a module, itself included, each once; walked through anew after changes only.

    `module.modules()` is generators inside of generators, one deep for every level of the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._walk()

    def _walk(self) -> None:
        self._modules = tuple(self._root.modules())
        self._held = children_of(self._modules)
        self._children = self._children_now()

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._held))]

    def now(self) -> Sequence[nn.Module]:
        """Return the modules that there are now, in the order of `nn.Module.modules`."""
        children = self._children_now()
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._walk()
        return self._modules


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
    return _with_gradient(leaves_of((args, kwargs)))


def outputs_with_gradient(output: Any) -> tuple[list[Tensor], bool]:
    """Return the tensors among a call's results whose gradients a backward computes."""
    if type(output) is Tensor:
        return ([output] if output.requires_grad else []), False
    leaves = leaves_of(output)
    hides = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))]
    return _with_gradient(leaves), bool(hides)


def _with_gradient(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@having(asker, value=Asker.ENGINE)
def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return where a tensor's gradient arrives; of a leaf torch finds that with gradients only."""
    with torch.enable_grad():
        return get_gradient_edge(tensor)


class LeftGraphs:
    """Looks for tensors with a graph that a forward has left on modules, as MoE routers do."""

    def __init__(self, root: nn.Module) -> None:
        self._known = KnownModules(root)
        self._modules: Sequence[nn.Module] = ()
        self._held: list[dict[str, Any]] = []  # the attributes of each
        self._no_tensors: set[type] = set()  # classes of what lies on modules

    def are_there(self) -> bool:
        """Whether there is such a tensor now."""
        modules = self._known.now()
        if modules is not self._modules:
            self._modules, self._held = modules, [vars(module) for module in modules]
        values = chain.from_iterable(map(dict.values, self._held))
        return not self._no_tensors.issuperset(map(type, values)) and self._look()

    def _look(self) -> bool:
        values = [*chain.from_iterable(map(dict.values, self._held))]
        self._no_tensors.update(type(one) for one in values if not isinstance(one, Tensor))
        return any(isinstance(one, Tensor) and one.grad_fn is not None for one in values)


def on_exit(inputs: Sequence[Tensor], left: Callable[[Any], None]) -> None:
    """Call a function when a backward has computed the gradients of a block's inputs."""
    if len(inputs) == 1:  # without the objects that counting takes
        inputs[0].register_hook(left)  # type: ignore[no-untyped-call]
    else:
        register_multi_grad_hook(inputs, left)


def on_entry(outputs: Sequence[Tensor], entered: Callable[[Any], None]) -> None:
    """Call a function when a backward enters a block, and after what waits for its gradients.

    The block after it is left by a hook of the same tensor, and is to be resharded first.
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
