"""Hooks around the calls of split layers, and of modules between them, see full activations."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

WIDTH, HEADS, VOCABULARY = 16, 4, 12
PLAN = {
    "tokens": "embedding_rowwise",
    "positions": "embedding_colwise",
    "*.qkv": "packed_colwise(3)",
    "*.q": "colwise",
    "*.k": "shared_heads(1)",
    "*.v": "shared_heads(1)",
    "*.out": "rowwise",
    "*.attend": "attention",
    "*.up": "colwise",
    "*.down": "rowwise",
    "chain.0": "colwise",
    "chain.2": "rowwise",
    "head": "colwise_parted",
}


class Fused(nn.Module):
    """An attention with one projection and a dropout of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one.view(batch, length, self.num_heads, -1).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        mixed = self.weights(q @ k.transpose(-1, -2)) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class SharedHead(nn.Module):
    """An attention of one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, 1
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        result: Tensor = self.down(self.act(self.up(x)) * scale)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(8, WIDTH)
        self.fused, self.shared, self.feed = Fused(), SharedHead(), FeedForward()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.ModuleDict(
            {"attend": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)}
        )
        self.chain = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x + self.fused(x)
        x = x + self.shared(x)
        x = x + self.feed(self.norm(x), scale=2.0)
        x = x + self.attend["attend"](x, x, x)[0]
        x = x + self.chain(x)
        result: Tensor = self.head(x)
        return result


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
IDS = torch.arange(24).view(3, 8) * 5 % VOCABULARY
Watch = Callable[[nn.Module, Callable[..., None]], Any]


def watch(net: nn.Module, note: Callable[..., None]) -> list[Any]:
    """Register a hook of each kind on each module."""
    handles = []
    for name, one in net.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            note(f"before {name}", (args, kwargs))

        def after(_: nn.Module, args: Any, result: Any, name: str = name) -> None:
            note(f"after {name}", (args, result))

        def backward(_: nn.Module, grads: Any, outer: Any, name: str = name) -> None:
            note(f"backward {name}", (grads, outer))

        handles.append(one.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(one.register_forward_hook(after))
        if name:
            handles.append(one.register_full_backward_hook(backward))
    return handles


def watch_globally(net: nn.Module, note: Callable[..., None]) -> list[Any]:
    names = {module: name for name, module in net.named_modules()}

    def before(module: nn.Module, args: Any) -> None:
        if module in names:
            note(f"before {names[module]}", args)

    def after(module: nn.Module, args: Any, result: Any) -> None:
        if module in names:
            note(f"after {names[module]}", (args, result))

    def backward(module: nn.Module, grads: Any, outer: Any) -> None:
        if names.get(module):
            note(f"backward {names[module]}", (grads, outer))

    return [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after),
        register_module_full_backward_hook(backward),
    ]


Seen = dict[str, list[Tensor]]


def run(net: nn.Module, watching: Any) -> tuple[Tensor, Seen]:
    seen: Seen = {}
    fresh = lambda one: one.detach().clone()  # noqa: E731

    def note(name: str, value: Any) -> None:
        seen[name] = [fresh(one) for one in tree_leaves(value) if isinstance(one, Tensor)]

    handles = watching(net, note)
    try:
        loss: Tensor = F.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten())
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return loss.detach(), seen


def check_gradients(split: SplitModel, net: nn.Module, full: nn.Module) -> None:
    for (name, param), expected in zip(net.named_parameters(), full.parameters(), strict=True):
        assert param.grad is not None, name
        got = split.full(param, param.grad)
        torch.testing.assert_close(got, expected.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("watching", [watch, watch_globally])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hooks_see_full_features(num_ranks: int, watching: Any, sequence: bool) -> None:
    """A hook on a split layer, or on an activation behind it, got this rank's features."""
    full = make_net()
    expected_loss, expected = run(full, watching)

    def fn(rank: int) -> None:
        net = make_net()
        group = all_ranks()
        split = SplitModel(net, match_plan(net, PLAN), group, sequence_parallel=sequence)
        loss, seen = run(net, watching)
        torch.testing.assert_close(loss, expected_loss)
        assert seen.keys() == expected.keys()
        for name, values in expected.items():
            for got, value in zip(seen[name], values, strict=True):
                torch.testing.assert_close(got + 0, value, msg=lambda m, n=name: f"{n}: {m}")
        check_gradients(split, net, full)
        split.restore()
        assert all(not one._forward_hooks and not one._forward_pre_hooks for one in net.modules())

    run_ranks(fn, num_ranks)


def ramp(one: Tensor) -> Tensor:
    """Return a factor for each feature or head, which differ."""
    return torch.linspace(0.5, 1.5, one.shape[-1], dtype=one.dtype)


def returning(_: nn.Module, args: Any, result: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one * ramp(one), result)


def in_place(_: nn.Module, args: Any, result: Any) -> None:
    for one in tree_leaves(result):
        one[..., 0] = 0.0


def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one * ramp(one), args), kwargs


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "returns": lambda one: one.register_forward_hook(returning),
    "in place": lambda one: one.register_forward_hook(in_place),
    "before": lambda one: one.register_forward_pre_hook(before, with_kwargs=True),
}
EDITED = ("fused.qkv", "fused.weights", "fused.out", "shared.q", "shared.k", "feed.up", "feed.act")
EDITED = (*EDITED, "feed.down", "attend.attend", "chain.1", "head", "positions")


NOT_EDITED = {"before": ["positions"], "in place": ["fused.weights", "chain.1"]}


def edited_loss(net: nn.Module, use: str) -> Tensor:
    """Train through hooks that change what layers are given or give; they are gone afterwards."""
    names = [name for name in EDITED if name not in NOT_EDITED.get(use, ())]
    handles = [EDITS[use](net.get_submodule(name)) for name in names]
    loss = F.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten())
    for handle in handles:
        handle.remove()
    return loss


def distilled_loss(net: nn.Module, _: str) -> Tensor:
    """Compare kept activations with what a teacher might have had."""
    kept: dict[str, Tensor] = {}
    handles = []
    for name in (*EDITED, "shared.v", "chain.0", "tokens"):

        def keep(_: nn.Module, args: Any, result: Any, name: str = name) -> None:
            kept[name] = result[0] if isinstance(result, tuple) else result

        handles.append(net.get_submodule(name).register_forward_hook(keep))
    loss = F.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten())
    for handle in handles:
        handle.remove()
    return loss + sum(((one - ramp(one)) ** 2).mean() for one in kept.values())


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("use", [*EDITS, "kept"])
def test_what_hooks_return_or_keep_is_of_all_ranks(use: str, num_ranks: int) -> None:
    """A factor for each feature did not fit, zeroed features were each rank's first."""
    loss_of = distilled_loss if use == "kept" else edited_loss
    full = make_net()
    expected = loss_of(full, use)
    expected.backward()

    def fn(rank: int) -> None:
        net = make_net()
        split = SplitModel(net, match_plan(net, PLAN), all_ranks())
        with split.step():
            loss = loss_of(net, use)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        check_gradients(split, net, full)

    run_ranks(fn, num_ranks)


class Rolled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(-2)


def test_a_hook_of_what_cannot_be_told_is_refused_by_name() -> None:
    """A hook between split layers got this rank's part of a tensor that has no dimension of it."""

    def fn(rank: int) -> None:
        net = nn.Sequential(nn.Linear(4, 8), Rolled(), nn.Unflatten(-1, (-1, 4)), nn.Linear(8, 4))
        SplitModel(net, match_plan(net, {"0": "colwise"}), all_ranks())
        net[1].register_forward_hook(lambda *_: None)
        with pytest.raises(
            ConfigError, match=r"Rank \d: '1', which is called between split .*\(12,\)"
        ):
            net(torch.ones(3, 4))

    run_ranks(fn, 2)


def test_a_copy_has_the_users_hooks() -> None:
    calls: list[tuple[int, ...]] = []

    def fn(rank: int) -> None:
        net = make_net()
        split = SplitModel(net, match_plan(net, PLAN), all_ranks())
        if rank == 0:
            net.feed.act.register_forward_hook(lambda _, args, result: calls.append(result.shape))
        with split.step():
            pass
        act = copy.deepcopy(net.feed.act)
        act(torch.ones(2, 3))

    run_ranks(fn, 2)
    assert calls == [(2, 3)]
