"""Classes of tensors that compute for themselves: what torch hands over reaches their functions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.core.tensor_calls import SeesCalls, SeesOperations, changed_by


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
