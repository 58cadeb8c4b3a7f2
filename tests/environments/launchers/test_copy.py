"""What stands in functions and methods belongs to a model's copy; what stops a copy is named."""

import copy
import dataclasses
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.environments.launchers._copy import (
    compile_again,
    copy_with_functions,
    exchange_iterator,
    name_of,
    uncompiled,
    way_of,
)


class Net(nn.Module):
    """Holds itself in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.found: dict[str, Callable[[], Any]] = {}

    def own(self, *_: Any) -> "Net":
        return self


def _of_kwargs(*, model: Any) -> Any:
    return model


def _decorated(model: Net) -> Callable[[], Any]:
    @wraps(model.own)
    def wrapped() -> Any:
        return model.own()

    return wrapped


def _recursive(model: Net) -> Callable[[], Any]:
    def count(left: int = 2) -> Any:
        return count(left - 1) if left else model

    return count


WAYS: dict[str, Callable[[Net], Callable[[], Any]]] = {
    "bound method": lambda model: model.own,
    "closure": lambda model: lambda: model,
    "closure over a part": lambda model: (lambda layer: lambda: layer)(model.layer),
    "closure over a method": lambda model: (lambda own: lambda: own())(model.own),
    "closure over a list": lambda model: (lambda several: lambda: several[0])([model]),
    "default": lambda model: lambda model=model: model,
    "partial": lambda model: partial(_of_kwargs, model=model),
    "partial of a method": lambda model: partial(model.own, 1),
    "partial of a closure": lambda model: partial(lambda: model),
    "method of a partial": lambda model: MethodType(partial(lambda one, two: two, model), model),
    "decorated": _decorated,
    "recursive": _recursive,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copys_functions_reach_the_copy(way: str) -> None:
    model = Net()
    model.found["it"] = WAYS[way](model)
    expected = model.layer if way == "closure over a part" else model
    assert model.found["it"]() is expected
    copied = copy_with_functions(model, {}, [model], [])
    assert copied is not model
    assert copied.found["it"]() is (copied.layer if way == "closure over a part" else copied)
    assert model.found["it"]() is expected


def test_functions_that_reach_nothing_of_it_are_shared() -> None:
    model, calls = Net(), list[int]()
    model.found = {"count": lambda: calls.append(1), "module's": torch.zeros, "own": len}
    copied = copy_with_functions(model, {}, [model], [])
    assert all(copied.found[name] is model.found[name] for name in model.found)


def test_two_functions_share_a_variable_in_the_copy() -> None:
    model = Net()
    current: Any = model

    def read() -> Any:
        return current

    def write(value: Any) -> None:
        nonlocal current
        current = value

    model.found = {"read": read, "write": write}
    copied = copy_with_functions(model, {}, [model], [])
    assert copied.found["read"]() is copied
    copied.found["write"](5)
    assert (copied.found["read"](), model.found["read"]()) == (5, model)


def test_hooks_of_modules_and_parameters_are_the_copys() -> None:
    model, seen = Net(), list[Any]()
    model.layer.register_forward_hook(lambda *_: seen.append(model))
    model.layer.weight.register_hook(lambda grad: grad * len(list(model.children())) * 3)
    model.layer.bias.register_post_accumulate_grad_hook(lambda _: seen.append(model.layer))
    model.layer.bias.no_decay = True
    copied = copy_with_functions(model, {}, [model], [])
    copied.layer(torch.ones(1, 2)).sum().backward()
    assert seen == [copied, copied.layer]
    assert torch.equal(copied.layer.weight.grad, torch.full((2, 2), 3.0))
    assert copied.layer.bias.no_decay


def test_a_parameter_that_is_frozen_after_it_was_given_hooks_is_copied() -> None:
    """A parameter that was frozen after it was given hooks could not be copied."""
    model, seen = Net(), list[Any]()
    model.layer.weight.register_hook(lambda grad: grad * 3)
    model.layer.bias.register_post_accumulate_grad_hook(lambda _: seen.append(model.layer))
    model.layer.requires_grad_(False)
    copied = copy_with_functions(model, {}, [model], [])
    assert [p.requires_grad for p in copied.layer.parameters()] == [False, False]
    copied.layer.requires_grad_(True)
    copied.layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(copied.layer.weight.grad, torch.full((2, 2), 3.0))
    assert seen == [copied.layer]


def test_other_deep_copies_are_as_ever() -> None:
    def function() -> None: ...

    before = copy._deepcopy_dispatch[FunctionType]  # type: ignore[attr-defined]

    class Fails:
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        copy_with_functions(Fails(), {}, [], [])
    assert copy._deepcopy_dispatch[FunctionType] is before  # type: ignore[attr-defined]
    assert copy.deepcopy(function) is function


class Holder:
    """Holds what Python or torch copy nothing of."""

    def __init__(self, path: Path) -> None:
        path.write_text("first\nsecond\n")
        self.read, self.written = path.open(), path.with_suffix(".log").open("w")
        self.binary = path.open("rb")
        self.lock, self.changed, self.module = threading.RLock(), threading.Condition(), itertools
        weight = torch.ones(2, requires_grad=True)
        self.kept = [(weight * 2).as_subclass(torch.Tensor), (weight * 3).as_subclass(Own)]
        self.binary.read(6)


class Own(Tensor):
    """A class of the user's."""


def test_locks_files_modules_and_graphs_stop_no_copy(tmp_path: Path) -> None:
    """A rank has its own, or shares them; graphs were right in attributes of modules only."""
    held = Holder(tmp_path / "lines.txt")
    copied = copy_with_functions(held, {}, [], [])
    with copied.changed:
        copied.changed.notify_all()
    assert copied.lock is not held.lock
    assert copied.module is itertools
    assert copied.written is held.written
    assert (copied.binary.read(), held.binary.read()) == (b"second\n", b"second\n")
    assert (copied.read.readline(), held.read.readline()) == ("first\n", "first\n")
    assert [(type(one), one.tolist()) for one in copied.kept] == [
        (Tensor, [2.0, 2.0]),
        (Own, [3.0, 3.0]),
    ]
    assert not any(one.requires_grad for one in copied.kept)
    for file in (held.read, held.written, held.binary, copied.read, copied.binary):
        file.close()


def test_a_method_of_a_list_is_that_of_the_copys_list() -> None:
    """It was the original's: what a copy appended came to the original."""
    held: list[Any] = []
    copied, append = copy_with_functions((held, held.append), {}, [], [])
    append(1)
    assert (copied, held) == ([1], [])


def test_a_thread_is_refused() -> None:
    """Its copy would not run, and whoever waits for it would wait for ever."""
    with pytest.raises(TypeError, match="the copy of 'watcher' would not run"):
        copy_with_functions([threading.Thread(name="watcher")], {}, [], [])
    assert "__deepcopy__" not in vars(threading.Thread)


def test_what_torch_keeps_a_tensors_hooks_in() -> None:
    tensor = Tensor([1.0]).requires_grad_()
    assert tensor._backward_hooks is None
    tensor.register_hook(lambda grad: grad)
    tensor.register_post_accumulate_grad_hook(lambda one: None)  # type: ignore[no-untyped-call]
    assert len(tensor._backward_hooks) == len(tensor._post_accumulate_grad_hooks) == 1  # type: ignore[attr-defined]


def test_compiled_code_of_a_copy_computes_with_the_copy() -> None:
    """Compiled code of a copy computed with the original."""
    model: Any = nn.Linear(1, 1)
    model.compiled = torch.compile(model.forward, backend="eager")
    model.closure = torch.compile(lambda x: x * model.weight, backend="eager")
    copied = copy_with_functions(model, {}, [model], [])
    with torch.no_grad():
        model.weight.zero_(), copied.weight.fill_(3.0), copied.bias.zero_()
    assert copied.compiled(torch.ones(1)) == 3
    assert copied.closure(torch.ones(1)) == 3
    assert model.closure(torch.ones(1)) == 0


# torch 2.13 looks at the inputs of what it compiles
@pytest.mark.filterwarnings(r"ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_copy_of_a_compiled_block_is_compiled() -> None:
    """A copy of a compiled block was not compiled."""
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].compile(backend="eager")
    copied = copy_with_functions(model, {}, [model], [])
    assert copied[0]._compiled_call_impl is not None
    assert copied[0]._compiled_call_impl is not model[0]._compiled_call_impl
    with torch.no_grad():
        copied[0].weight.zero_(), copied[0].bias.fill_(5.0)
    assert copied(torch.ones(1)) == 5


def test_hooks_and_schedulers_of_an_optimizer_are_the_copys() -> None:
    model, seen = Net(), list[Any]()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.optimizer.register_step_post_hook(lambda *_: seen.append(model))
    model.scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)
    copied = copy_with_functions(model, {}, [model], [])
    copied.optimizer.step()
    copied.scheduler.step()  # warns if it does not know the optimizer's step
    assert copied.optimizer._opt_called
    assert seen == [copied]


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_compiled_function_says_what_it_was_made_of() -> None:
    assert uncompiled(torch.compile(doubled, backend="eager")) is doubled
    assert uncompiled(doubled) is None


def test_another_function_is_compiled_with_the_same_options() -> None:
    compiled: list[int] = []

    def backend(graph: nn.Module, inputs: object) -> object:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    again = compile_again(torch.compile(doubled, backend=backend), lambda x: x + 1)
    assert again(torch.ones(1)) == 2
    assert compiled == [1]


def _fails(value: Any) -> list[Any]:
    try:
        copy.deepcopy(value)
    except Exception as error:
        return way_of(error)
    raise AssertionError("it was copied")


@dataclasses.dataclass(frozen=True)
class Frozen:
    items: Any


def test_the_name_leads_from_what_is_known_to_the_culprit() -> None:
    with socket.socket() as one:
        model, outer = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1))}), SimpleNamespace()
        model["a"][0].sources = (1, {"x": [one]})
        outer.found = [model]
        way = _fails({"all": outer})
    path = "a.0.sources[1]['x'][0], a socket,"
    assert name_of(way, {id(outer): "trainer"}, "") == f"trainer.found[0].{path}"
    assert name_of(way, {id(outer): "trainer", id(model): "model"}, "") == f"model.{path}"
    assert name_of(way, {}, "what is launched") == "what is launched"


def _numbers() -> Iterator[int]:
    yield from range(4)


@pytest.mark.parametrize(
    "items",
    [_numbers, lambda: map(abs, _numbers()), lambda: iter(DataLoader([0, 1, 2, 3], batch_size=1))],
    ids=["generator", "map", "loader"],
)
@pytest.mark.parametrize("hold", [Frozen, lambda one: [one], lambda one: {"x": one}])
def test_each_copy_goes_through_all_items_from_where_the_iterator_stands(
    items: Any, hold: Any
) -> None:
    """Python copies no generator, nor what is made of one, and torch no iterator of a loader."""
    held = hold(items())
    read = {Frozen: lambda one: one.items, list: lambda one: one[0], dict: lambda one: one["x"]}
    next(read[type(held)](held))
    assert exchange_iterator(_fails(held)) is not None
    others = [copy.deepcopy(held) for _ in range(2)]
    left = [[int(one) for one in read[type(held)](each)] for each in (*others, held)]
    assert left == [[1, 2, 3]] * 3


def test_what_is_no_iterator_or_held_by_a_tuple_stays() -> None:
    with socket.socket() as one:
        assert exchange_iterator(_fails([one])) is None
    assert exchange_iterator(_fails((_numbers(),))) is None
