"""Classes of tensors that compute for themselves: what torch hands over reaches their functions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_shard.core import tensor_calls
from lightning_shard.core.tensor_calls import (
    OF_FORMAT,
    OF_GRAPH,
    OF_MEMORY,
    OF_OBJECT,
    OF_SHAPE,
    PICKLES,
    Exchanged,
    SeesCalls,
    SeesOperations,
    changed_by,
    found_in,
    map_only,
    name_of,
)


def _empty(kind: type[Tensor]) -> Any:
    return Tensor._make_wrapper_subclass(kind, (2,), dtype=torch.float32)


class _Told(SeesCalls, SeesOperations):
    """Returns what it was asked, and lets `neg` through to the operations."""

    @classmethod
    @override
    def called(cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (torch.neg, torch.Tensor.new_zeros):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func.__name__, len(args), kwargs

    @classmethod
    @override
    def dispatched(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.full((len(args),), 7.0 if kwargs else 5.0)


@pytest.mark.parametrize("made", [torch.zeros, lambda size: nn.Parameter(torch.zeros(size))])
def test_data_of_a_plain_tensor_asks_the_class_of_what_it_is_set_to(made: Any) -> None:
    """The tensor had no memory afterwards: reading it ended the process."""
    tensor, asked = made(2), []

    class Asked(_Told):
        @classmethod
        @override
        def called(cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
            asked.append((func, args))

    tensor.data = value = _empty(Asked)
    assert [func for func, _ in asked] == [Tensor.data.__set__]  # type: ignore[attr-defined]
    assert [*map(id, asked[0][1])] == [id(tensor), id(value)]
    tensor.data = torch.ones(3)
    assert tensor.data.tolist() == [1.0, 1.0, 1.0]


def test_calls_come_before_operations() -> None:
    told = _empty(_Told)
    assert told.add(1, alpha=2) == ("add", 2, {"alpha": 2})
    assert torch.neg(told).tolist() == [5.0]
    assert told.new_zeros(3, dtype=torch.int8).tolist() == [7.0, 7.0]


def test_a_class_without_a_rule_says_so() -> None:
    class Silent(SeesCalls, SeesOperations):
        """Has neither rule."""

    silent = _empty(Silent)
    with pytest.raises(NotImplementedError):
        silent.add(1)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NotImplementedError):
        torch.neg(silent)


def test_arguments_are_walked_through_as_torch_does() -> None:
    """The own walk is there for its speed; what is rare, such as a named tuple, is torch's."""
    one = torch.ones(2)
    values = [(one, {"a": [one, 2, None]}, "b"), one.max(0), torch.Size([1]), slice(0, 1), {1: ()}]

    def doubled(tensor: Tensor) -> Tensor:
        return tensor * 2

    expected = tree_map_only(Tensor, doubled, values)
    assert str(map_only(Tensor, doubled, values)) == str(expected)
    assert len(found_in(Tensor, values)) == 4


def test_each_tensor_is_exchanged_once_and_given_back() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    exchanged = Exchanged(Tensor, torch.clone)
    first, (second, third) = exchanged.given((one, [one, other]))
    assert first is second is not one
    assert third is not other
    back = exchanged.returned({"a": third, "b": [second, one]})
    assert back["a"] is other
    assert all(each is one for each in back["b"])


def test_what_a_function_changes_is_known_however_it_is_told() -> None:
    """`nn.init` names its arguments, and `torch.norm` an `out` of None."""
    first, second = torch.ones(2), torch.zeros(2)
    assert changed_by(torch.norm, (first,), {"p": 2, "out": None}) == []
    for args, kwargs in (((first,), {}), ((), {"tensor": first, "mean": 0.0})):
        (changed,) = changed_by(nn.init.normal_, args, kwargs)
        assert changed is first
    (changed,) = changed_by(torch.add, (first, first), {"out": second})
    assert changed is second
    several = changed_by(torch._foreach_add_, ([first, second], 1.0), {})
    assert all(one is other for one, other in zip(several, (first, second), strict=True))


_KNOWN = OF_FORMAT | OF_SHAPE | OF_OBJECT | OF_GRAPH
_OF_THE_FULL = {  # they tell of the full tensor as of any, and nobody calls them in a step
    *("repr", "is_view", "cdata", "volatile", "grad_dtype", "type", "gradient", "sym_not"),
    *("dense_dim", "sparse_dim", "dim_order", "storage_offset", "is_same_size"),
    *("is_distributed", "is_pinned", "is_shared", "module_load"),
}


# What torch raises where a function takes other arguments.
_OTHER_ARGUMENTS = (
    TypeError,
    RuntimeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    AssertionError,
)


def _calls(made: Any) -> Iterator[tuple[Any, ...]]:
    """Yield arguments as functions take them, of tensors of the user's."""
    yield (made(),)
    for other in (made(), 0, 0.5):
        yield made(), other
    yield ([made(), made()],)
    yield [made()], [made()]
    yield [made()], 1.0


def _answers(func: Any, made: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the first arguments with which a function can be called, and its answer."""
    for args in _calls(made):
        before = [(one, one._version) for one in tree_leaves(args) if isinstance(one, Tensor)]
        try:
            answer = func(*args)
        except _OTHER_ARGUMENTS:
            continue
        changed = [one for one, version in before if one._version != version]
        yield (
            answer,
            [one for one in changed if all(one is not x for x in changed_by(func, args, {}))],
        )
        return


@pytest.mark.filterwarnings("ignore")
def test_the_table_knows_each_function_of_tensors_that_its_default_does_not_fit() -> None:
    """A new torch has functions of its own: by default one is computed from the full elements.

    That does not fit what is known without elements, what changes a tensor under a name that does
    not say so, and what leads to a tensor's memory.
    """
    unknown, num_called = set(), 0
    for func in get_testing_overrides():
        name = name_of(func)
        if func in _KNOWN or name in _OF_THE_FULL | OF_MEMORY | PICKLES:
            continue
        for answer, _ in _answers(func, lambda: torch.empty(2, 2, device="meta")):
            is_told = answer is not None and answer is not NotImplemented
            if is_told and not any(isinstance(one, Tensor) for one in tree_leaves(answer)):
                unknown.add(f"{resolve_name(func)} needs no elements")
        for answer, changed in _answers(func, lambda: torch.full((2, 2), 0.5)):
            num_called += 1
            if changed:
                unknown.add(f"{resolve_name(func)} writes")
            if isinstance(answer, (torch.UntypedStorage, torch.TypedStorage)):
                unknown.add(f"{resolve_name(func)} leads to memory")
    assert unknown == set()
    assert num_called > 500


@pytest.mark.filterwarnings("ignore")
def test_properties_of_tensors_that_can_be_set_are_known() -> None:
    """One that is not is set on a tensor that stands for the elements, and nobody hears of it."""
    leaf = torch.ones(2)
    settable = set()
    for name in dir(Tensor):
        one: Any = getattr(Tensor, name)
        if callable(one) or not hasattr(one, "__set__") or name.startswith("__"):
            continue
        try:
            one.__set__(leaf, one.__get__(leaf))
        except (AttributeError, RuntimeError, TypeError):
            continue
        if one.__set__ not in _KNOWN | {tensor_calls.SET_DATA, tensor_calls.SET_GRAD}:
            settable.add(name)
    assert settable == {"_grad", "_grad_fn", "grad_dtype", "real", "volatile"}


def test_each_function_is_of_one_kind() -> None:
    kinds = [OF_FORMAT, OF_SHAPE, OF_OBJECT, OF_GRAPH]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
