"""Steps on pieces leave what steps on each parameter by itself leave, whatever happens between."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.groups import engine_of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without state": lambda p: optim.SGD(p, lr=0.1),
}


COUNTS = ("step", "eta", "mu", "mu_product")


class Branches(nn.Module):
    """Two ways to the output, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(3, 5)
        self.ways = nn.ModuleList(nn.Linear(5, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, ways: list[int]) -> Tensor:
        hidden = torch.tanh(self.common(x))
        outs = torch.stack([self.ways[way](hidden) for way in ways])
        return (self.scale * outs.sum(0)).square().mean()


def made(name: str, num_groups: int) -> tuple[Branches, Optimizer]:
    torch.manual_seed(0)
    model = Branches()
    named = [*model.named_parameters()]
    groups = [{"params": [param for _, param in named]}]
    if num_groups == 2:
        decay = [param for name, param in named if name.endswith("weight")]
        others = [param for name, param in named if not name.endswith("weight")]
        groups = [{"params": others}, {"params": decay, "lr": 0.05}]
    return model, OPTIMIZERS[name](groups)


class Run:
    """A run of a single device, or of an engine's ranks.

    Args:
        stage: None for a single device.
    """

    def __init__(self, name: str, num_groups: int, stage: int | None) -> None:
        self.model, self.optimizer = made(name, num_groups)
        self.names = {param: name for name, param in self.model.named_parameters()}
        self.shapes = {param: param.shape for param in self.names}
        self.engine: DataParallelEngine | None = None
        self.seen: list[int] = []
        if stage is not None:
            self.engine = engine_of(self.model, stage=stage)
            self.sharded = ShardedOptimizer(self.optimizer, self.engine)
            watch(self.optimizer, self.seen)

    def step(self, ways: list[int]) -> None:
        """Train on one batch."""
        x = torch.linspace(-1, 1, 12).view(4, 3) + 0.1
        self.optimizer.zero_grad()
        if self.engine is None:
            self.model(x, ways).backward()
        else:
            with self.engine.step():
                loss = self.model(x, ways)
            with self.engine.backward():
                loss.backward()
        self.optimizer.step()

    def full(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state of the optimizer and of the model as a single device has them."""
        if self.engine is None:
            return self.optimizer.state_dict(), dict(self.model.state_dict())
        state = full_state_dict(self.optimizer, self.engine)
        self.engine.detach(restore=True)
        return state, dict(self.model.state_dict())


def watch(optimizer: Any, seen: list[int]) -> None:
    """Let `seen` have of each step how many tensors the optimizer updates."""
    init_group = optimizer._init_group

    def spy(group: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seen.append(sum(param.grad is not None for param in group["params"]))
        return init_group(group, *args, **kwargs)

    optimizer._init_group = spy


def every_way(run: Run) -> None:
    run.step([0, 1])


def one_way(run: Run) -> None:
    run.step([1])


def lower_rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.9


def edit_in_place(run: Run) -> None:
    for entries in run.optimizer.state.values():
        for key, value in entries.items():
            if key not in COUNTS:
                value.mul_(0.5)


def edit_a_count(run: Run) -> None:
    param = run.model.common.weight
    if "step" in run.optimizer.state.get(param, {}):
        run.optimizer.state[param]["step"].add_(3.0)


def exchange(run: Run) -> None:
    for param in run.names:
        for key, value in run.optimizer.state.get(param, {}).items():
            if value.ndim and run.shapes[param]:
                run.optimizer.state[param][key] = torch.full(run.shapes[param], 0.25)


def load(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def thaw_and_freeze(run: Run) -> None:
    bias = run.model.common.bias
    bias.requires_grad = not bias.requires_grad


EVENTS = (
    every_way,
    every_way,
    every_way,
    one_way,
    lower_rate,
    edit_in_place,
    edit_a_count,
    exchange,
    load,
    thaw_and_freeze,
)


def walk(run: Run, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        chance.choice(EVENTS)(run)
    every_way(run)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_may_happen_between_steps_changes_nothing(name: str, stage: int) -> None:
    seed = sum(map(ord, name)) + stage
    num_groups = 1 + seed % 2
    alone = Run(name, num_groups, None)
    walk(alone, seed)
    state, weights = alone.full()

    def fn(rank: int) -> Any:
        run = Run(name, num_groups, stage)
        walk(run, seed)
        return run.full()

    (got_state, got), *_ = (one for one in run_ranks(fn, 2) if one is not None)
    torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-6)
    assert got_state["state"].keys() == state["state"].keys()
    for index, entries in state["state"].items():
        torch.testing.assert_close(got_state["state"][index], entries, rtol=1e-4, atol=1e-6)


def ranks_of(fn: Callable[[Run], Any], name: str = "AdamW", stage: int = 2) -> list[Any]:
    """Call a function on two ranks with a run of each."""
    found = run_ranks(lambda rank: fn(Run(name, 1, stage)), 2)
    return [one for one in found if one is not None]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_updates_flat_shards(stage: int) -> None:
    """An optimizer updated every shard by itself."""

    def fn(run: Run) -> tuple[list[int], int]:
        every_way(run)
        every_way(run)
        assert run.engine is not None
        return run.seen, len(run.engine.gradients)

    for seen, num_buffers in ranks_of(fn, stage=stage):
        assert seen == [num_buffers] * 2
        assert num_buffers < len(list(Branches().parameters())) / 2


def test_a_hook_that_runs_inside_a_step_sees_each_parameter() -> None:
    def fn(run: Run) -> list[bool]:
        every_way(run)
        seen: list[bool] = []

        def look(optimizer: Optimizer, *_: Any) -> None:
            (group,) = optimizer.param_groups
            grads = [param.grad for param in group["params"]]
            seen.append(any(grad is not None and grad.ndim == 1 for grad in grads))
            seen.extend(param in run.names for param in group["params"])

        run.optimizer.register_step_pre_hook(look)
        every_way(run)
        return seen

    assert all(map(all, ranks_of(fn)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_is_cut_short_leaves_the_groups_their_parameters(error: Any) -> None:
    """A step that is cut short left the groups without their parameters."""

    def fn(run: Run) -> tuple[bool, list[int]]:
        optimizer: Any = run.optimizer
        init_group = optimizer._init_group

        def fail(*_: Any) -> None:
            raise error

        every_way(run)
        optimizer._init_group = fail
        with pytest.raises(error):
            every_way(run)
        listed = [param for group in optimizer.param_groups for param in group["params"]]
        known = [*optimizer.state_dict()["state"]]
        optimizer._init_group = init_group
        every_way(run)
        return listed == [*run.names], known

    for are_listed, known in ranks_of(fn):
        assert are_listed
        assert set(known) <= set(range(len(list(Branches().parameters()))))


def test_a_backward_through_updated_parameters_raises() -> None:
    """A backward through updated parameters went unnoticed."""

    def fn(run: Run) -> str:
        assert run.engine is not None
        every_way(run)
        with run.engine.step():
            loss = run.model(torch.ones(4, 3), [0, 1])
        with run.engine.backward():
            loss.backward(retain_graph=True)
        run.optimizer.step()
        with pytest.raises(RuntimeError) as found, run.engine.backward():
            loss.backward()
        return str(found.value)

    for message in ranks_of(fn):
        assert "modified by an inplace operation" in message


def averages_of(run: Run) -> list[Tensor]:
    return [one["exp_avg"] for one in run.optimizer.state.values() if "exp_avg" in one]


def test_state_that_is_loaded_lies_flat() -> None:
    """State lay apart after it was loaded."""

    def fn(run: Run) -> list[int]:
        every_way(run)
        for entries in run.optimizer.state.values():
            entries.update({key: value.clone() for key, value in entries.items()})
        nums = []
        for _ in range(2):
            nums.append(len({one.untyped_storage().data_ptr() for one in averages_of(run)}))
            every_way(run)
        return nums

    for apart, together in ranks_of(fn):
        assert together < apart


def test_counts_that_a_hook_has_made_unequal_count_on_by_themselves() -> None:
    def fn(run: Run) -> tuple[list[float], list[int]]:
        every_way(run)
        counts = [one["step"] for one in run.optimizer.state.values() if "step" in one]
        for index, count in enumerate(counts):
            count.fill_(float(index))
        every_way(run)
        return [*map(float, counts)], run.seen

    for counts, seen in ranks_of(fn):
        assert counts == [index + 1.0 for index in range(len(counts))]
        assert seen[1] >= seen[0]


def every_way_watched(run: Run) -> None:
    handle = run.optimizer.register_step_pre_hook(lambda *_: None)
    every_way(run)
    handle.remove()


def set_data_of_entries(run: Run) -> None:
    for entries in run.optimizer.state.values():
        for key, value in entries.items():
            if key not in COUNTS:
                value.data = value.data * 0.5


def edit_past_versions(run: Run) -> None:
    for entries in run.optimizer.state.values():
        if "step" in entries:
            entries["step"].data.add_(7.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize(
    "events",
    [
        (lambda run: run.optimizer.step(), every_way_watched, every_way),
        (every_way, set_data_of_entries, every_way, every_way),
        (every_way, edit_past_versions, every_way),
        (one_way, every_way_watched, every_way, one_way, every_way),
    ],
    ids=["watched step", "data of entries", "counts past versions", "branches"],
)
def test_state_that_others_have_made_or_moved_is_that_of_one_device(
    events: tuple[Callable[[Run], Any], ...], name: str, stage: int
) -> None:
    """State that others have made or moved was lost."""
    alone = Run(name, 1, None)
    for event in events:
        event(alone)
    state, weights = alone.full()

    def fn(rank: int) -> Any:
        run = Run(name, 1, stage)
        for event in events:
            event(run)
        return run.full()

    (got_state, got), *_ = (one for one in run_ranks(fn, 2) if one is not None)
    torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got_state["state"], state["state"], rtol=1e-4, atol=1e-6)


def test_an_edit_through_a_tensor_that_a_hook_has_kept_counts() -> None:
    """An edit through a tensor that a hook has kept was ignored."""

    def fn(run: Run) -> float:
        weights = [param for param, name in run.names.items() if name.endswith("weight")]
        kept = [run.optimizer.state[weight]["sum"] for weight in weights]
        every_way(run)
        every_way(run)
        for one in kept:
            one.zero_()
        return sum(float(run.optimizer.state[weight]["sum"].sum()) for weight in weights)

    assert ranks_of(fn, name="Adagrad") == [0.0, 0.0]


def test_state_that_user_code_has_given_up_is_freed() -> None:
    """State that user code has given up stayed in memory."""

    def fn(run: Run) -> bool:
        every_way(run)
        every_way(run)
        storage = averages_of(run)[0].untyped_storage()
        known = [weakref.ref(storage)]
        del storage
        gc.collect()
        was_there = known[0]() is not None
        run.optimizer.state.clear()
        gc.collect()
        return was_there and known[0]() is None

    assert all(ranks_of(fn))


class Many(nn.Module):
    """More parameters than few pieces, which two groups may have in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def of_one_kind(name: str) -> bool:
    return False


def by_decay(name: str) -> bool:
    return name.endswith("bias")


def by_layer(name: str) -> bool:
    return int(name.split(".")[1]) % 2 == 0


@pytest.mark.parametrize(
    ("key_of", "by_itself"), [(of_one_kind, False), (by_decay, False), (by_layer, True)]
)
def test_groups_that_alternate_cost_more_on_many_short_pieces(
    key_of: Callable[[str], bool], by_itself: bool
) -> None:
    def fn(rank: int) -> bool:
        model = Many()
        named = [*model.named_parameters()]
        keys = [key_of(name) for name, _ in named]
        groups = [
            {"params": [param for key, (_, param) in zip(keys, named, strict=True) if key is one]}
            for one in sorted(set(keys))
        ]
        engine = engine_of(model, stage=1)
        optimizer: Any = optim.SGD(groups, lr=0.1)
        ShardedOptimizer(optimizer, engine)
        seen: list[bool] = []
        init_group = optimizer._init_group

        def spy(group: dict[str, Any], *args: Any) -> Any:
            seen.extend(param in own for param in group["params"])
            return init_group(group, *args)

        own, optimizer._init_group = {param for _, param in named}, spy
        with engine.step():
            loss = model(torch.ones(1, 2))
        with engine.backward():
            loss.backward()
        optimizer.step()
        assert len(set(seen)) == 1
        return seen[0]

    assert run_ranks(fn, 2) == [by_itself] * 2


@pytest.mark.parametrize(("eps", "dtype"), [(0.0, torch.float32), (1e-8, torch.float16)])
def test_padding_stays_finite(eps: float, dtype: torch.dtype) -> None:
    """Padding became NaN."""

    def fn(rank: int) -> bool:
        layer = nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1)).to(dtype)
        engine = engine_of(layer, stage=1)
        optimizer = optim.AdamW(layer.parameters(), lr=0.1, eps=eps)
        ShardedOptimizer(optimizer, engine)
        with engine.step():
            loss = layer(torch.ones(2, 1, dtype=dtype)).sum()
        with engine.backward():
            loss.backward()
        optimizer.step()
        return all(bool(one.flat.full.isfinite().all()) for one in engine.gradients)

    assert run_ranks(fn, 2) == [True, True]
