"""Fails when torch changes what we use of its insides."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_shard.data_parallel.torch_private import (
    in_backward,
    innermost_function_mode,
    is_traced,
    queue_after_backward,
    saving_hook,
)


def test_in_backward() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(in_backward()))
    assert not in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not in_backward()


def test_queued_callbacks_run_after_every_gradient_and_once() -> None:
    events = []
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))

    def arrived(_: torch.Tensor) -> None:
        if not events:
            queue_after_backward(lambda: events.append("end"))
        events.append("gradient")

    for param in (a, b):
        param.register_post_accumulate_grad_hook(arrived)
    (a * b).sum().backward()
    assert events == ["gradient", "gradient", "end"]
    a.sum()
    assert events[-1] == "end"


def test_a_leaf_saved_by_autograd_shows_what_it_points_at_in_backward() -> None:
    """Why a unit must stay full until its last backward node has run."""
    param = torch.nn.Parameter(torch.ones(3))
    out = (torch.ones(3, requires_grad=True) * 2 * param).sum()
    param.data = torch.full((3,), 5.0)
    grads = torch.autograd.grad(out, param)
    assert grads[0].tolist() == [2.0] * 3


def test_a_freed_storage_comes_back_under_the_same_views() -> None:
    full = torch.arange(4.0)
    view = full[1:3]
    full.untyped_storage().resize_(0)
    assert view.untyped_storage().nbytes() == 0
    full.untyped_storage().resize_(16)
    full.copy_(torch.arange(4.0))
    assert view.tolist() == [1.0, 2.0]


def test_every_checkpoint_and_recomputation_has_a_saving_hook_of_its_own() -> None:
    hooks: list[object] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        hooks.append(saving_hook())
        return x.tanh().tanh()

    x = torch.ones(2, requires_grad=True)
    assert saving_hook() is None
    for _ in range(2):
        checkpoint(keep, x, use_reentrant=False).sum().backward()
    assert None not in hooks
    assert len(set(hooks)) == len(hooks) == 4
    assert saving_hook() is None


def test_compilers_look_at_tensors_before_their_code_runs() -> None:
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(is_traced())
            return super().__torch_function__(func, types, args, kwargs or {})

    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.ones(2).as_subclass(Watched)
    torch.compile(lambda: leaf * 2, backend="eager")()
    assert any(seen)
    assert not is_traced()


def test_the_innermost_function_mode_is_the_one_entered_last() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode() as outer, Mode() as inner:
        assert innermost_function_mode() is inner is not outer
    assert innermost_function_mode() is None
