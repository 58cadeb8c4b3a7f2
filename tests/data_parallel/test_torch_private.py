"""Fails when torch changes what we use of its insides."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_shard.data_parallel import torch_private
from lightning_shard.data_parallel.torch_private import (
    COMPILED_MODULE,
    GENERATES,
    GENERATES_TOGETHER,
    GLOBAL_HOOKS,
    INITIALISERS,
    FakeTensorMode,
    are_held_alone,
    check_batch_norm_input,
    count_saved,
    exchange_contents,
    forget_forward_hooks,
    gradient_hooks,
    has_compiled_call,
    has_gradient_hooks,
    hooks_of,
    in_backward,
    innermost_function_mode,
    is_called_plainly,
    is_checkpointing,
    is_compiled_function,
    is_composite,
    is_persistent,
    is_traced,
    keeps_graph,
    pass_for_parameter,
    put_next_to_step,
    queue_after_backward,
    saving_hook,
    storage_key,
    storage_uses,
    tensors_at,
    without_function_modes,
    without_hooks,
)
from lightning_shard.data_parallel.units.unsharding import TracedHook, looks_at_values


def test_exchange_contents() -> None:
    param, other = nn.Parameter(torch.ones(2, device="meta")), nn.Parameter(torch.zeros(2))
    param.note = 1
    exchange_contents(param, other)
    assert param.tolist() == [0, 0]
    assert other.is_meta
    assert param.note == 1
    graph = param * 1
    with pytest.raises(RuntimeError, match="in a graph"):
        exchange_contents(param, nn.Parameter(torch.zeros(2)))
    del graph
    exchange_contents(param, nn.Parameter(torch.ones(2)))
    assert param.tolist() == [1, 1]


def test_put_next_to_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    called: list[str] = []
    hooks = {name: (lambda *_, name=name: called.append(name)) for name in "abcde"}
    first = optimizer.register_step_pre_hook(hooks["c"])
    for name in "ab":
        optimizer.register_step_pre_hook(hooks[name])
    optimizer.register_step_post_hook(hooks["e"])
    assert put_next_to_step(optimizer, first, optimizer.register_step_post_hook(hooks["d"]))
    optimizer.step()
    assert called == [*"abcde"]


def test_hooks_of_users_of_an_optimizer_are_known() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    own = [optimizer.register_step_pre_hook(has_gradient_hooks)]
    own.append(optimizer.register_step_post_hook(has_gradient_hooks))
    assert not put_next_to_step(optimizer, *own)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert put_next_to_step(optimizer, *own)
    handle.remove()


def test_has_gradient_hooks() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not has_gradient_hooks(param)
    handle = param.register_hook(lambda grad: grad)
    assert has_gradient_hooks(param)
    handle.remove()
    assert not has_gradient_hooks(param)
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert has_gradient_hooks(param)


def test_without_function_modes() -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting(), without_function_modes():
        torch.ones(2).is_meta  # noqa: B018
    assert Counting.calls == 0


def test_initialisers_of_layers() -> None:
    layers = nn.Linear(2, 2), nn.MultiheadAttention(2, 1)
    assert [hasattr(layers[i], INITIALISERS[i]) for i in range(2)] == [True, True]


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


def test_the_hooks_of_a_gradient_and_of_a_forward() -> None:
    layer = nn.Linear(2, 2)
    assert gradient_hooks(layer.weight) == {}
    handle = layer.weight.register_hook(lambda grad: grad)
    assert len(gradient_hooks(layer.weight)) == 1
    handle.remove()
    called: list[str] = []
    layer.register_forward_hook(lambda *_: called.append("after"))
    layer.register_forward_pre_hook(lambda *_: called.append("before"))
    layer(torch.ones(2))
    assert called == ["before", "after"]
    forget_forward_hooks(layer)
    layer(torch.ones(2))
    assert called == ["before", "after"]


def test_the_hooks_of_all_modules() -> None:
    layer = nn.Linear(2, 2)
    called: list[str] = []
    assert is_called_plainly(layer, looks_at_values)
    layer.register_forward_hook(TracedHook(lambda *_: called.append("own")))
    assert is_called_plainly(layer, looks_at_values)
    registered = (
        register_module_forward_hook(lambda *_: called.append("after")),
        register_module_forward_pre_hook(lambda *_: called.append("before")),
        register_module_full_backward_hook(lambda *_: called.append("backward")),
        register_module_full_backward_pre_hook(lambda *_: called.append("gradient")),
    )
    try:
        assert [len(hooks) for hooks in GLOBAL_HOOKS] == [1, 1, 1, 1]
        assert not is_called_plainly(layer, looks_at_values)
        with without_hooks():
            layer(torch.ones(2))
        assert called == ["own"]
        layer(torch.ones(2, requires_grad=True)).sum().backward()
        assert called == ["own", "before", "after", "own", "gradient", "backward"]
    finally:
        for handle in registered:
            handle.remove()


def test_what_compile_leaves_in_a_module() -> None:
    layer = nn.Linear(2, 2)
    wrapped = torch.compile(layer, backend="eager")
    assert getattr(wrapped, COMPILED_MODULE) is layer
    assert not has_compiled_call(layer)
    assert not is_compiled_function(layer.forward)
    assert is_compiled_function(torch.compile(layer.forward, backend="eager"))
    layer.compile(backend="eager")
    assert has_compiled_call(layer)


def test_which_buffers_are_saved() -> None:
    layer = nn.Module()
    layer.register_buffer("kept", torch.ones(2))
    layer.register_buffer("made", torch.ones(2), persistent=False)
    assert is_persistent(layer, "kept")
    assert not is_persistent(layer, "made")
    assert list(layer.state_dict()) == ["kept"]


def test_a_batch_norm_refuses_a_batch_of_other_dimensions() -> None:
    check_batch_norm_input(nn.BatchNorm1d(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        check_batch_norm_input(nn.BatchNorm1d(2), torch.ones(3, 2, 4, 4))


def test_what_passes_for_a_parameter() -> None:
    class Other(Tensor):
        pass

    tensor = torch.ones(2).as_subclass(Other)
    assert not isinstance(tensor, nn.Parameter)
    pass_for_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)


def test_a_memory_without_elements_has_a_key() -> None:
    with FakeTensorMode():
        one, other = torch.empty(4), torch.empty(4)
    assert storage_key(one) == storage_key(one[1:])
    assert storage_key(one) != storage_key(other)


def test_who_holds_a_memory_is_counted() -> None:
    tensor = torch.ones(4)
    assert storage_uses(tensor) == 1
    kept = [tensor[1:], tensor.detach(), tensor.numpy(), tensor.untyped_storage()]
    assert storage_uses(tensor) >= 1 + len(kept)
    del kept
    assert storage_uses(tensor) == 1


def test_who_lies_in_a_memory_is_found() -> None:
    memory, x = torch.ones(4), torch.ones(3, 2, requires_grad=True)
    view, param = memory[2:], nn.Parameter(memory.view(2, 2))
    out, row = nn.functional.linear(x, param), param[0]
    known = {id(one) for one in (memory, view, param, row)}
    assert count_saved(memory, [out, row.exp()], 9) == 1  # which makes it a tensor of Python's
    assert {id(one) for one in tensors_at(memory)} == known


def test_what_a_graph_has_saved_of_a_memory_is_counted() -> None:
    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight.t())
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            (saved,) = ctx.saved_tensors
            return grads[0] @ saved, None

    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(3, 2, requires_grad=True)
    out = Weighted.apply(nn.functional.linear(x, weight).tanh(), weight)
    found = count_saved(weight, [out], 9)
    assert found == storage_uses(weight) - 1 == 2
    assert count_saved(weight, [out], 1) == 1
    assert count_saved(torch.ones(1), [out], 9) == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_a_backward_knows_whether_it_keeps_its_graph(keeps: bool) -> None:
    x, known = torch.ones(1, requires_grad=True), list[bool]()
    out = x.exp()
    out.register_hook(lambda _: known.append(keeps_graph()))
    out.backward(retain_graph=keeps)
    assert known == [keeps]


def test_who_else_holds_the_tensors_of_a_list_is_known() -> None:
    tensors, other = list(torch.ones(6).split(2)), nn.Parameter(torch.ones(2))
    assert are_held_alone(tensors)
    assert are_held_alone([])
    kept = tensors[1]
    assert not are_held_alone(tensors)
    del kept
    assert are_held_alone(tensors)
    other.grad = tensors[2]
    assert not are_held_alone(tensors)


def test_the_innermost_function_mode_is_the_one_entered_last() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode() as outer, Mode() as inner:
        assert innermost_function_mode() is inner is not outer
    assert innermost_function_mode() is None


def test_which_operations_are_made_of_others() -> None:
    assert is_composite(torch.ops.aten.matmul.default)
    assert not is_composite(torch.ops.aten.mm.default)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_is_checkpointing(is_recomputed: bool) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(is_checkpointing(saving_hook()))
        return x.sin()

    assert not is_checkpointing(saving_hook())
    loss = checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum()
    if is_recomputed:
        loss.backward()
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not is_checkpointing(saving_hook())
    assert seen == [True] * (1 + is_recomputed)


def test_hooks_of_a_module_are_in_its_dictionaries() -> None:
    module = nn.Linear(1, 1)
    handles = [
        module.register_forward_hook(lambda *_: None),
        module.register_forward_pre_hook(lambda *_: None),
        module.register_full_backward_hook(lambda *_: None),
        module.register_full_backward_pre_hook(lambda *_: None),
    ]
    assert [len(hooks) for hooks in hooks_of(module)] == [1] * len(handles)


def test_generates_together() -> None:
    from transformers.generation import GenerationMixin
    from transformers.integrations.fsdp import is_fsdp_managed_module

    assert hasattr(GenerationMixin, GENERATES)
    module = nn.Linear(1, 1)
    vars(module)[GENERATES_TOGETHER] = True
    assert is_fsdp_managed_module(module)


def test_what_runs_and_what_is_made_by_transforms_is_known() -> None:
    seen = []

    def looked_at(x: torch.Tensor) -> torch.Tensor:
        with torch_private.outside_transforms():
            outside = torch_private.wraps_tensors()
        is_of_rows = torch_private.is_batched(x)
        seen.append(
            (torch_private.wraps_tensors(), outside, torch_private.is_wrapped(x), is_of_rows)
        )
        return x**2

    x = torch.tensor(2.0, requires_grad=True)
    torch.func.grad(looked_at)(x)
    y = looked_at(x)
    y.register_hook(looked_at)
    torch.autograd.grad(y, x, torch.ones(2), is_grads_batched=True)
    inside, outside, rows = (True, False, True, False), (False,) * 4, (False, False, False, True)
    assert seen == [inside, outside, rows]
    with dual_level():
        assert torch_private.in_transform()
    assert not torch_private.in_transform()
    graphs = []

    def recorded(x: torch.Tensor) -> torch.Tensor:
        graphs.append(torch_private.is_recorded_as_graph())
        return x * 2

    make_fx(recorded)(torch.ones(2))
    assert graphs == [True]
    assert not torch_private.is_recorded_as_graph()
