"""The parts of a step on a clock that the test moves: they add up, and nothing counts twice."""

import pytest

from lightning_shard.backends.traffic import OperationTraffic
from lightning_shard.profiling.step_monitor import AxisTraffic, StepClock


class World:
    """A clock, and a collective that takes time on it."""

    def __init__(self) -> None:
        self.now, self._traffic = 0.0, AxisTraffic()
        self.clock = StepClock(self._since, lambda: self.now)

    def _since(self) -> AxisTraffic:
        since, self._traffic = self._traffic, {}
        return since

    def talk(self, axis: str, seconds: float, waited: float) -> None:
        self.now += seconds
        own = self._traffic.setdefault(axis, {})
        more = OperationTraffic(calls=1, seconds=seconds, seconds_waited=waited)
        own["all_reduce"] = own.get("all_reduce", OperationTraffic()) + more


def test_the_parts_of_a_step_add_up_to_its_duration() -> None:
    world = World()
    world.now += 3.0  # the loader
    world.clock.begin_batch()
    world.now += 10.0  # forward and backward
    world.talk("dp", 5.0, waited=4.0)
    world.talk("tp", 2.0, waited=1.5)
    world.clock.begin_update()
    world.talk("dp", 1.0, waited=1.0)  # the norm
    world.now += 0.5
    world.clock.end_update()
    world.now += 0.25
    world.clock.end_batch()
    step = world.clock.take()
    assert step.loading == pytest.approx(3.0)
    assert step.waiting == pytest.approx({"dp": 5.0, "tp": 1.5})
    assert step.sending == pytest.approx(1.5)
    assert step.optimizer == pytest.approx(0.5)
    assert step.compute == pytest.approx(10.25)
    assert step.seconds == pytest.approx(21.75)


def test_batches_of_accumulated_gradients_are_one_step() -> None:
    world = World()
    for _ in range(3):
        world.now += 1.0
        world.clock.begin_batch()
        world.now += 2.0
        world.clock.end_batch()
    step = world.clock.take()
    assert (step.num_batches, step.loading, step.compute) == (3, 3.0, 6.0)
    assert world.clock.take().seconds == 0.0


def test_a_validation_is_no_part_of_a_step() -> None:
    world = World()
    world.clock.begin_batch()
    world.now += 2.0
    world.clock.end_batch()
    world.now += 0.5
    world.clock.pause()
    world.now += 100.0
    world.talk("dp", 50.0, waited=50.0)
    world.clock.go_on()
    world.now += 0.25
    world.clock.begin_batch()
    world.clock.end_batch()
    step = world.clock.take()
    assert step.seconds == pytest.approx(2.75)
    assert step.loading == pytest.approx(0.75)
    assert step.waiting == {}


def test_collectives_between_batches_are_not_loading() -> None:
    world = World()
    world.clock.end_batch()
    world.now += 1.0
    world.talk("dp", 4.0, waited=3.0)
    world.clock.begin_batch()
    world.clock.end_batch()
    step = world.clock.take()
    assert step.loading == pytest.approx(1.0)
    assert step.waiting == {"dp": 3.0}


def test_a_step_that_was_skipped_has_no_update() -> None:
    world = World()
    world.clock.begin_update()  # the gradient overflowed: the optimizer is not called
    world.now += 1.0
    world.clock.end_batch()
    assert world.clock.take().optimizer == 0.0
