"""Ranks of different pace: the bound holds, a slow rank slows nobody within it, updates are right.

Who may go on is told by tables and by simulated worlds in which messages take their time.

In one test each rank's gradient is a power of a base, so that parameters themselves tell which
gradients they include.

What travels lies where its owner looks for it.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_shard.data_parallel.async_sgd.async_sgd import Clocks, Kind, Message, Wire, mean
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError, RankFailedError
from lightning_shard.optim.clipping import clip_grad_norm
from lightning_shard.testing import Fault, run_ranks
from tests.data_parallel.async_sgd.programs import Recording, Worker, let_others_run
from tests.groups import all_ranks

BASE = 2**11  # of the counts that a parameter holds: more steps than any rank takes


class Counting(nn.Module):
    """Every element is minus the sum over ranks of BASE**rank times the rank's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(37, dtype=torch.float64))

    def loss(self, rank: int) -> Tensor:
        return float(BASE**rank) * self.values.sum()

    def counts(self, num_ranks: int) -> list[list[int]]:
        """By element and rank, how many gradients are included."""
        totals = [int(value) for value in (-self.values).tolist()]
        return [[total // BASE**rank % BASE for rank in range(num_ranks)] for total in totals]


def counted(model: Counting, num_ranks: int, bound: int) -> Worker:
    """A worker whose updates have the weight 1."""
    return Worker.build(
        model, lambda params: torch.optim.SGD(params, lr=num_ranks), bound=bound, rule=None
    )


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "turns"), [(1, 4), pytest.param(4, 12, marks=pytest.mark.slow)])
def test_a_thousand_updates_stay_within_the_bound(bound: int, turns: int) -> None:
    num_ranks, num_steps = 4, 250

    def program(rank: int) -> Any:
        model = Counting()
        worker = counted(model, num_ranks, bound)
        oldest = 0
        for step in range(num_steps):
            if rank == 2:
                let_others_run(turns)
            counts = model.counts(num_ranks)
            oldest = max(oldest, step - min(map(min, counts)))
            worker.step(lambda: model.loss(rank))
            held = worker.sgd.recording.held[-1]
            known = {tuple(version) for version in held}
            assert {tuple(one) for one in counts} <= known  # the version counters do not lie
        worker.sgd.finish()
        return worker.sgd.counters, oldest, model.counts(num_ranks)

    for rank, (counters, oldest, counts) in enumerate(run_ranks(program, num_ranks)):
        assert counters.gradients == 1000
        assert counters.steps == num_steps
        assert oldest == counters.max_staleness <= bound
        if rank != 2:  # all the others are held up by it, at the bound
            assert oldest == bound
            assert counters.waits > num_steps // 2
        assert counts == [[num_steps] * num_ranks] * 37


@pytest.mark.parametrize("bound", [1, 3])
def test_fast_ranks_take_their_steps_without_the_slow_one_and_then_wait(bound: int) -> None:
    num_ranks, slow = 4, 1
    workers: dict[int, Worker] = {}

    def program(rank: int) -> Any:
        model = Counting()
        workers[rank] = counted(model, num_ranks, bound)
        others = [other for other in range(num_ranks) if other != slow]
        if rank == slow:  # in its first step until everybody waits for it
            while not all(o in workers and workers[o].sgd.counters.waits for o in others):
                let_others_run(1)
            return [workers[other].sgd.counters.steps for other in others], finish(2 * bound)
        for _ in range(bound):
            workers[rank].step(lambda: model.loss(rank))
        assert workers[rank].sgd.counters.waits == 0
        return finish(bound)

    def finish(num_steps: int) -> int:
        rank = torch.distributed.get_rank()
        worker = workers[rank]
        model = worker.engine.model
        for _ in range(num_steps):
            worker.step(lambda: model.loss(rank))
        worker.sgd.finish()
        return worker.sgd.counters.max_staleness

    results = run_ranks(program, num_ranks)
    steps_beside_the_slow_one, _ = results[slow]
    assert steps_beside_the_slow_one == [bound + 1] * 3
    assert [results[rank] for rank in (0, 2, 3)] == [bound] * 3


def test_a_delay_of_one_rank_is_taken_up() -> None:
    def program(rank: int) -> int:
        model = Counting()
        worker = counted(model, 3, bound=2)
        for _ in range(8):
            worker.step(lambda: model.loss(rank))
        worker.sgd.finish()
        assert model.counts(3) == [[8] * 3] * 37
        return worker.sgd.counters.max_staleness

    fault = Fault(rank=1, at_collective=35, kind="delay", seconds=1)  # beside other work, too
    assert max(run_ranks(program, 3, faults=[fault])) == 2


# --- against a simulation written by hand --------------------------------------------------------

DATA = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MOMENTUM, NUM_STEPS, CLIP = 0.8, 12, 0.7


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(DATA[rank, step]) - DATA[rank, step].sum().sin()).square().sum()


def rate_at(step: int) -> float:
    return 0.2 / (1 + step)


def train_network(rank: int, num_ranks: int, rule: str | None) -> Any:
    model = network()
    worker = Worker.build(
        model, lambda params: torch.optim.SGD(params, lr=1.0, momentum=MOMENTUM), bound=3, rule=rule
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(worker.optimizer, rate_at)
    for step in range(NUM_STEPS):
        if rank == 0:
            let_others_run(3 + 10 * (step % 3))
        worker.step(
            lambda step=step: loss_of(model, rank, step),
            lambda: clip_grad_norm(list(model.parameters()), CLIP, worker.engine),
        )
        if step + 1 < NUM_STEPS:
            schedule.step()
    worker.sgd.agree()
    layout = [
        [(slot.name, shard.param_offset, shard.param_stop) for slot, shard in _shards(flat, owner)]
        for owner in range(num_ranks)
        for flat in worker.engine.flats
    ]
    return worker.sgd.recording, {n: p.detach() for n, p in model.named_parameters()}, layout


def _shards(flat: Any, owner: int) -> Any:
    return zip(flat.layout.slots, flat.layout.shard_slices(owner), strict=True)


class Simulation:
    """One process that holds every version of every shard, and follows recordings.

    Args:
        recordings: By rank, the order of arrival and what each step had of each shard.
        layout: By owner, the stretches of the parameters.
        rule: Of the learning rate.
    """

    def __init__(self, recordings: list[Recording], layout: Any, rule: str | None) -> None:
        self.recordings, self.layout, self.rule = recordings, layout, rule
        self.size = len(recordings)
        self.model = network()
        starts = [self.cut(self.model.named_parameters(), owner) for owner in range(self.size)]
        self.versions = [{0: start} for start in starts]  # by the number of gradients
        self.momenta = [torch.zeros_like(start) for start in starts]
        self.applied = [[0] * self.size for _ in range(self.size)]
        self.num_events = [0] * self.size
        self.gradients: dict[tuple[int, int], list[Tensor]] = {}
        self.ages: list[int] = []

    def cut(self, named: Any, owner: int) -> Tensor:
        full = dict(named)
        return torch.cat(
            [full[name].detach().flatten()[a:b] for name, a, b in self.layout[owner]]
        ).clone()

    def gradient(self, rank: int, step: int) -> list[Tensor] | None:
        """By owner, what a rank computed; None while what it was computed with is not there."""
        held = [sum(version) for version in self.recordings[rank].held[step]]
        if any(number not in self.versions[owner] for owner, number in enumerate(held)):
            return None
        for owner, number in enumerate(held):
            self.paste(owner, self.versions[owner][number])
        self.model.zero_grad()
        loss_of(self.model, rank, step).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        grads = {name: param.grad for name, param in self.model.named_parameters()}
        return [self.cut(grads, owner) for owner in range(self.size)]

    @torch.no_grad()
    def paste(self, owner: int, values: Tensor) -> None:
        begin = 0
        for name, a, b in self.layout[owner]:
            self.model.get_parameter(name).view(-1)[a:b] = values[begin : begin + b - a]
            begin += b - a

    def computed(self, rank: int, step: int) -> bool:
        """Compute a gradient if it can be by now."""
        if (rank, step) not in self.gradients:
            gradient = self.gradient(rank, step)
            if gradient is None:
                return False
            self.gradients[rank, step] = gradient
        return True

    def advance(self, owner: int) -> bool:
        """Apply the next update of an owner's recording, if its gradients are there by now."""
        events, applied = self.recordings[owner].events, self.applied[owner]
        if self.num_events[owner] == len(events):
            return False
        event = events[self.num_events[owner]]
        if not all(self.computed(rank, applied[rank]) for rank in event.ranks):
            return False
        done = sum(applied)
        change = torch.zeros_like(self.momenta[owner])
        weights = 0.0
        for rank in event.ranks:
            age = done - sum(self.recordings[rank].held[applied[rank]][owner])
            self.ages.append(age)
            old = self.rule == "inverse" and age >= 2 * self.size
            weight = 1 / self.size / (age // self.size if old else 1)
            change += weight * self.gradients[rank, applied[rank]][owner]
            weights += weight
            applied[rank] += 1
        self.momenta[owner] = MOMENTUM * self.momenta[owner] + change / weights
        step = rate_at(event.owner_step - 1) * weights * self.momenta[owner]
        self.versions[owner][sum(applied)] = self.versions[owner][done] - step
        self.num_events[owner] += 1
        return True

    def run(self) -> dict[str, Tensor]:
        while any(self.advance(owner) for owner in range(self.size)):
            pass
        for owner in range(self.size):
            self.paste(owner, self.versions[owner][sum(self.applied[owner])])
        return {name: param.detach() for name, param in self.model.named_parameters()}


@pytest.mark.parametrize("rule", ["inverse", None])
def test_updates_are_those_of_a_simulation_of_the_same_order(rule: str | None) -> None:
    """Momentum, each rank's own clipping, each owner's own schedule, the age of each gradient."""
    num_ranks = 3
    results = run_ranks(lambda rank: train_network(rank, num_ranks, rule), num_ranks)
    recordings = [recording for recording, _, _ in results]
    simulation = Simulation(recordings, results[0][2], rule)
    expected = simulation.run()
    assert len(simulation.ages) == num_ranks * num_ranks * NUM_STEPS
    assert max(simulation.ages) >= 2 * num_ranks  # the rule has had something to do
    for _, weights, _ in results:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


# --- agreement and errors ------------------------------------------------------------------------


def test_ranks_agree_often_and_go_on() -> None:
    def program(rank: int) -> list[list[float]]:
        torch.manual_seed(2)
        model = network()
        worker = Worker.build(model, torch.optim.AdamW, bound=2)
        seen = []
        for step in range(9):
            if rank == 1:
                let_others_run(7)
            worker.step(lambda step=step: loss_of(model, rank, step))
            if step % 3 == 2:
                worker.sgd.agree()
                worker.sgd.agree()  # nothing is left to agree on
                seen.append(nn.utils.parameters_to_vector(model.parameters()).tolist())
        worker.sgd.finish()
        return seen

    first, *others = run_ranks(program, 3)
    assert len(first) == 3
    assert all(other == first for other in others)


def test_parameters_that_a_rank_does_not_use() -> None:
    """No rank uses the last one: AdamW's decay leaves it alone. One rank uses the middle one."""

    def program(rank: int) -> Any:
        model = nn.ParameterList(nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(3))
        make = lambda params: torch.optim.AdamW(params, lr=0.3, weight_decay=0.1)  # noqa: E731
        worker = Worker.build(model, make, bound=2)
        for _ in range(4):
            worker.step(lambda: model[0].sum() + (model[1].sum() if rank == 1 else 0.0))
        worker.sgd.agree()
        states = [len(worker.optimizer.state[param]) for param in model]
        return [param.tolist() for param in model], states

    (values, states), (other_values, _) = run_ranks(program, 2)
    first, second, third = values
    assert values == other_values
    assert third == [1.0] * 5
    assert first[0] < 0.9
    assert second[0] < 0.9
    assert states[2] == 0


def test_a_mean_counts_a_missing_gradient_as_zero() -> None:
    one, other = torch.tensor([4.0]), torch.tensor([8.0])
    assert mean([[one, None, one], [other, None, None]], [0.5, 0.25]) == [
        torch.tensor([4.0 * 2 / 3 + 8.0 / 3]),
        None,
        torch.tensor([4.0 * 2 / 3]),
    ]
    narrow = mean([[torch.tensor([1.0], dtype=torch.bfloat16)]] * 300, [1.0] * 300)[0]
    assert narrow is not None
    assert narrow.dtype == torch.bfloat16
    assert narrow.item() == 1.0


def test_ranks_that_meet_after_different_numbers_of_steps_are_told() -> None:
    def program(rank: int) -> None:
        model = Counting()
        worker = counted(model, 3, bound=2)
        for _ in range(5 if rank == 1 else 3):
            worker.step(lambda: model.loss(rank))
        worker.sgd.agree()

    with pytest.raises(ConfigError, match=r"Rank 1 has taken \d steps and rank \d 3 before"):
        run_ranks(program, 3)


def test_a_dead_peer_is_an_error_for_those_who_wait_for_it() -> None:
    errors: list[BaseException] = []

    def program(rank: int) -> None:
        model = Counting()
        worker = counted(model, 3, bound=1)
        try:
            for _ in range(20):
                worker.step(lambda: model.loss(rank))
        except RankFailedError as error:
            errors.append(error)
            worker.sgd.abandon()
            raise

    fault = Fault(rank=2, at_collective=50, kind="drop")
    with pytest.raises(RankFailedError, match="rank 2"):
        run_ranks(program, 3, faults=[fault])
    assert errors


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Callable[[], Any] | None = None) -> None:
            """Change nothing."""

    with pytest.raises(ConfigError, match="Rateless has a group without a learning rate"):
        run_ranks(lambda _: Worker.build(Counting(), Rateless, bound=1), 1)


def test_a_step_that_nobody_announced_is_refused() -> None:
    def program(rank: int) -> None:
        model = Counting()
        worker = counted(model, 2, bound=1)
        worker.step(lambda: model.loss(rank))
        worker.optimizer.step()

    with pytest.raises(ConfigError, match="went past the Trainer"):
        run_ranks(program, 2)


def clocks_of(step: int, included: list[list[int]], bound: int = 2) -> Clocks:
    """Rank 0's."""
    clocks = Clocks(0, len(included), bound)
    clocks.step, clocks.included = step, included
    clocks.arrived = list(clocks.own)
    return clocks


@pytest.mark.parametrize(
    ("step", "included", "staleness", "may_start"),
    [
        (0, [[0, 0], [0, 0]], 0, True),
        (2, [[2, 0], [0, 0]], 2, True),
        (3, [[3, 0], [3, 3]], 3, False),  # the own shard lacks a peer's steps
        (3, [[3, 3], [0, 3]], 3, False),  # the peer's lacks the own ones
        (3, [[3, 1], [2, 1]], 2, True),
        (3, [[3, 5], [3, 6]], 0, True),  # who is behind never waits
    ],
)
def test_the_oldest_part_of_the_parameters_decides(
    step: int, included: list[list[int]], staleness: int, may_start: bool
) -> None:
    clocks = clocks_of(step, included)
    assert (clocks.staleness, clocks.may_start) == (staleness, may_start)


def test_the_age_counts_updates_of_all_ranks() -> None:
    assert clocks_of(3, [[3, 5, 1], [0] * 3, [0] * 3]).age([2, 3, 1]) == 3


def test_a_peer_waits_for_what_it_has_not_been_handed() -> None:
    clocks = clocks_of(0, [[1, 3], [0, 0]])
    assert clocks.waits(1)  # at step 3 it needs one step of all; it has none
    clocks.hand_over(1)
    assert not clocks.waits(1)
    clocks.arrive(1)
    assert not clocks.waits(1)  # it needs two, which are not there yet
    clocks.arrive(0)
    assert not clocks.waits(1)
    assert clocks.must_apply  # then they are
    clocks.apply(0)
    clocks.apply(1)
    assert clocks.waits(1)
    clocks.hand_over(1)
    assert not clocks.must_apply


def test_gradients_gather_until_they_let_the_own_rank_go_on() -> None:
    clocks = clocks_of(3, [[3, 0], [3, 3]])
    for rank in range(2):
        clocks.hand_over(rank)
    assert not clocks.must_apply
    clocks.arrive(1)
    assert clocks.must_apply


class SimulatedRank:
    """A rank in a world of messages that arrive when a seed says so."""

    def __init__(self, rank: int, world: "SimulatedWorld") -> None:
        self.rank, self.world = rank, world
        self.clocks = Clocks(rank, world.size, world.bound)
        self.is_waiting = False

    def push(self, peer: int) -> None:
        self.world.post(self.rank, peer, list(self.clocks.own))
        self.clocks.hand_over(peer)

    def peers(self) -> list[int]:
        return [rank for rank in range(self.world.size) if rank != self.rank]

    def serve(self) -> None:
        for peer in self.peers():
            for version in self.world.take(peer, self.rank):
                if version is None:
                    self.clocks.arrive(peer)
                else:
                    self.clocks.learn(peer, version)

    def apply(self) -> None:
        for rank in range(self.world.size):
            while self.clocks.own[rank] < self.clocks.arrived[rank]:
                self.clocks.apply(rank)

    def run(self) -> None:
        """Compute and end a step, or go on waiting."""
        clocks = self.clocks
        if not self.is_waiting:
            assert clocks.staleness <= self.world.bound
            for peer in self.peers():
                self.world.post(self.rank, peer, None)
            clocks.arrive(self.rank)
            self.serve()
            self.apply()
            clocks.step += 1
            for peer in self.peers():
                self.push(peer)
        else:
            self.serve()
            if clocks.must_apply:
                self.apply()
            for peer in filter(clocks.waits, self.peers()):
                self.push(peer)
        self.is_waiting = not clocks.may_start
        if not self.is_waiting:
            for peer in filter(clocks.lacks, self.peers()):
                self.push(peer)


class SimulatedWorld:
    def __init__(self, size: int, bound: int, seed: int) -> None:
        self.size, self.bound = size, bound
        self.random = random.Random(seed)
        self.ways: dict[tuple[int, int], list[list[int] | None]] = {}
        self.ranks = [SimulatedRank(rank, self) for rank in range(size)]

    def post(self, sender: int, receiver: int, version: list[int] | None) -> None:
        self.ways.setdefault((sender, receiver), []).append(version)

    def take(self, sender: int, receiver: int) -> list[list[int] | None]:
        """Let some of what is on its way arrive, in order."""
        way = self.ways.get((sender, receiver), [])
        count = self.random.randint(0, len(way))
        self.ways[sender, receiver] = way[count:]
        return way[:count]


@settings(max_examples=60)
@given(
    size=st.integers(2, 5),
    bound=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    stuck=st.booleans(),
)
def test_nobody_is_ever_too_far_ahead_nor_waits_for_ever(
    size: int, bound: int, seed: int, stuck: bool
) -> None:
    """Ranks run at random; the slowest may even stop between its steps, as in a long collective."""
    world = SimulatedWorld(size, bound, seed)
    for _ in range(200):
        world.random.choice(world.ranks).run()
    goal = max(rank.clocks.step for rank in world.ranks)
    stopped = [rank for rank in world.ranks if stuck and rank.clocks.step == goal]
    for _ in range(3000):
        behind = [rank for rank in world.ranks if rank.clocks.step < goal and rank not in stopped]
        if not behind:
            return
        world.random.choice(behind).run()
    pytest.fail(f"some rank waits for ever: {[rank.clocks.step for rank in world.ranks]}")


class Mixed(nn.Module):
    """Three formats, so three buffers; sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(35.0).view(7, 5))
        self.vector = nn.Parameter(torch.arange(3.0))
        self.phases = nn.Parameter(torch.arange(5.0).to(torch.complex128))
        self.wide = nn.Parameter(torch.arange(11, dtype=torch.float64))


def wire_of(num_ranks: int) -> tuple[Mixed, Wire]:
    model = Mixed()
    ranks = all_ranks()
    engine = DataParallelEngine(model, ranks, EngineOptions(stage=1))
    return model, Wire(engine.flats, num_ranks)


def test_the_parts_of_a_gradient_make_up_the_full() -> None:
    def program(rank: int) -> None:
        model, wire = wire_of(3)
        names = {param: name for name, param in model.named_parameters()}
        params = [param for flat in wire.flats for param in flat.params]
        grads = [None if names[p] == "vector" else torch.randn(p.shape).to(p) for p in params]
        parts = []
        for owner in range(3):
            message = wire.gradient(grads, owner)
            message.address(Kind.GRADIENT, 5, [owner, 2, 3])
            copy = Message(wire, message.data.clone())  # as it comes out of the other end
            assert (copy.kind, copy.received, copy.version) == (Kind.GRADIENT, 5, [owner, 2, 3])
            parts.append(wire.own_gradient(copy, owner))
        for index, grad in enumerate(grads):
            got = [part[index] for part in parts if part[index] is not None]
            if grad is None:
                assert not got
            else:
                assert torch.equal(torch.cat(got), grad.flatten())

    run_ranks(program, 3)


def test_shards_of_all_ranks_make_up_the_parameters() -> None:
    def program(rank: int) -> list[list[float]]:
        model, wire = wire_of(2)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(100 * rank)
        here = wire.shard()
        here.address(Kind.SHARD, 0, [0, 0])
        ranks = all_ranks()
        both = ranks.all_gather_object(here.data)
        wire.take_over(Message(wire, both[1 - rank]), 1 - rank)
        return [param.flatten().real.tolist() for param in model.parameters()]

    first, second = run_ranks(program, 2)
    assert first == second
    assert {value // 100 for values in first for value in values} == {0.0, 1.0}
