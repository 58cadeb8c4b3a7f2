"""Who is in which generation, without sockets or clocks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.elastic.membership.membership_table import (
    SHORTEST_START_SECONDS,
    Bounds,
    MembershipTable,
)

SILENCE_SECONDS = 7.0
PATIENCE_SECONDS = 20.0


class Job:
    """A membership table, the time, and what each participant was told."""

    def __init__(
        self,
        initial_size: int = 3,
        min_ranks: int = 1,
        max_ranks: int | None = None,
        max_failures: int = 2,
    ) -> None:
        self.now = 0.0
        self.told: dict[str, list[dict[str, Any]]] = {}
        self.generations: dict[int, tuple[str, ...]] = {}
        self.membership_table = MembershipTable(
            Bounds(
                min_ranks=min_ranks,
                max_ranks=max_ranks,
                patience_seconds=PATIENCE_SECONDS,
                max_failures=max_failures,
            ),
            initial_size=initial_size,
            silence_seconds=SILENCE_SECONDS,
            tell=self._tell,
            now=self.now,
        )

    def _tell(self, member: str, message: dict[str, Any]) -> None:
        self.told.setdefault(member, []).append(message)
        if message["kind"] == "generation":
            members = tuple(message["members"])
            assert self.generations.setdefault(message["number"], members) == members
            assert member in members
            assert set(members) <= set(self.membership_table.living)

    def join(self, initial_rank: int | None = None) -> str:
        return self.membership_table.join("m", initial_rank, self.now)

    def start(self) -> list[str]:
        return [self.join(rank) for rank in range(3)]

    def newcomer(self) -> str:
        member = self.join()
        self.membership_table.arrive(member, 0, None, self.now)
        return member

    def arrive(self, *members: str, error: str | None = None) -> None:
        for member in members:
            self.membership_table.arrive(member, self.membership_table.number, error, self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass in which everybody beats."""
        self.now += seconds
        for member in self.membership_table.living:
            self.membership_table.beat(member, self.now)
        self.membership_table.tick(self.now)

    def kinds(self, member: str) -> list[str]:
        return [message["kind"] for message in self.told.get(member, [])]

    def last(self, member: str) -> dict[str, Any]:
        return self.told[member][-1]


def test_the_first_generation_is_in_the_order_of_initial_ranks() -> None:
    job = Job()
    two, zero = job.join(2), job.join(0)
    assert job.membership_table.number == 0
    one = job.join(1)
    assert job.generations == {1: (zero, one, two)}
    assert job.last(one) == {
        "kind": "generation",
        "number": 1,
        "members": [zero, one, two],
        "is_last": False,
        "reason": "",
    }


def test_an_initial_rank_that_dies_before_the_start_is_not_waited_for() -> None:
    job = Job()
    zero, one = job.join(0), job.join(1)
    job.membership_table.lost(one, job.now)
    two = job.join(2)
    assert job.generations == {1: (zero, two)}


def test_initial_ranks_that_do_not_come_are_newcomers_when_they_do() -> None:
    job = Job()
    zero, two = job.join(0), job.join(2)
    job.wait(SHORTEST_START_SECONDS)
    assert job.generations == {1: (zero, two)}
    assert job.kinds(job.join(1)) == ["late"]


def test_survivors_keep_their_order_and_newcomers_come_last() -> None:
    job = Job()
    a, b, c = job.start()
    d = job.newcomer()
    job.membership_table.lost(a, job.now)
    assert job.last(b) == {"kind": "lost", "generation": 1, "member": a, "rank": 0, "event": "died"}
    job.arrive(c)
    assert job.membership_table.number == 1
    job.arrive(b)
    assert job.generations[2] == (b, c, d)
    assert job.last(b)["reason"] == f"rank 0 (member {a}) died; 1 rank(s) joined"


def test_a_newcomer_is_wanted_while_it_waits_and_there_is_room() -> None:
    job = Job(max_ranks=4)
    a, b, c = job.start()
    slow = job.join()  # not ready yet
    assert "wanted" not in job.kinds(a)
    d = job.newcomer()
    assert job.last(a) == {"kind": "wanted", "is_wanted": True}
    job.membership_table.lost(d, job.now)
    assert job.last(a) == {"kind": "wanted", "is_wanted": False}
    job.membership_table.arrive(slow, 0, None, job.now)
    job.arrive(a, b, c)
    assert job.generations[2] == (a, b, c, slow)
    spare = job.newcomer()
    assert job.kinds(spare) == ["waiting"]
    assert job.kinds(a)[-1] == "generation"
    job.membership_table.lost(b, job.now)
    assert job.kinds(a)[-2:] == ["lost", "wanted"]
    job.arrive(a, c, slow)
    assert job.generations[3] == (a, c, slow, spare)


def test_initial_ranks_above_max_ranks_are_newcomers() -> None:
    job = Job(max_ranks=2)
    a, b, c = job.start()
    assert job.generations == {1: (a, b)}
    assert job.kinds(c) == ["late"]


def test_all_members_are_ready_before_any_makes_its_groups() -> None:
    job = Job()
    a, b, c = job.start()
    for member in (a, b):
        job.membership_table.ready(member, 1, job.now)
        assert "go" not in job.kinds(a)
    job.membership_table.ready(c, 1, job.now)
    assert job.last(a) == {"kind": "go", "generation": 1}


def test_a_member_that_dies_before_it_is_ready_is_told_of() -> None:
    job = Job()
    a, b, c = job.start()
    job.membership_table.ready(a, 1, job.now)
    job.membership_table.lost(b, job.now)
    job.membership_table.ready(c, 1, job.now)
    assert "go" not in job.kinds(a)
    assert job.last(a)["kind"] == "lost"


def test_below_min_ranks_all_wait_and_then_end_together() -> None:
    job = Job(min_ranks=2)
    a, b, c = job.start()
    for lost in (a, b):
        job.membership_table.lost(lost, job.now)
    job.arrive(c)
    assert job.last(c)["text"] == ("waits for 1 more rank(s): has 1, min_ranks=2; ends in 20 s")
    job.wait(5.0)
    assert job.kinds(c).count("waiting") == 1
    job.wait(PATIENCE_SECONDS)
    assert job.last(c)["is_last"]
    assert job.generations[2] == (c,)
    job.membership_table.leave(c, is_done=True, now=job.now)
    assert job.membership_table.is_over


def test_below_min_ranks_a_newcomer_ends_the_wait() -> None:
    job = Job(min_ranks=2)
    a, b, c = job.start()
    for lost in (a, b):
        job.membership_table.lost(lost, job.now)
    job.arrive(c)
    d = job.newcomer()
    assert job.generations[2] == (c, d)
    assert not job.last(c)["is_last"]


def test_a_silent_member_is_declared_dead_and_comes_back_under_another_name() -> None:
    job = Job()
    a, b, c = job.start()
    job.now = SILENCE_SECONDS + 0.5
    for member in (a, c):
        job.membership_table.beat(member, job.now)
    job.membership_table.tick(job.now)
    assert job.last(a)["event"] == "fell silent for 7.5 s"
    assert job.last(b)["kind"] == "declared_dead"
    job.arrive(a, c)
    assert job.generations[2] == (a, c)
    job.membership_table.beat(b, job.now)  # it lives after all
    assert job.last(b) == {"kind": "declared_dead", "member": b, "event": "was given up before"}
    again = job.newcomer()
    assert again != b
    job.arrive(a, c)
    assert job.generations[3] == (a, c, again)


def test_nobody_is_declared_dead_for_the_time_in_which_the_server_was_stopped() -> None:
    job = Job()
    job.start()
    job.now = 10 * SILENCE_SECONDS
    job.membership_table.forgive(job.now)
    job.membership_table.tick(job.now)
    assert len(job.membership_table.living) == 3


def test_who_fails_too_often_is_evicted_with_its_error() -> None:
    job = Job(max_failures=2)
    a, b, c = job.start()
    for count in range(1, 4):
        job.arrive(b, error="ValueError: no")
        assert {"kind": "lost", "event": "raised ValueError: no"}.items() <= job.last(a).items()
        job.arrive(a, c)
        assert job.generations[count + 1] == ((a, b, c) if count < 3 else (a, c))
    assert job.last(b) == {"kind": "evicted", "failures": 3, "error": "ValueError: no"}
    assert job.last(a)["reason"].endswith(f"rank 1 (member {b}) was evicted")


def test_a_loss_is_no_failure_of_those_who_notice() -> None:
    job = Job(max_failures=0)
    a, b, c = job.start()
    job.membership_table.lost(a, job.now)
    job.arrive(b, c)
    assert job.generations[2] == (b, c)


def test_all_are_evicted_when_all_fail_at_once() -> None:
    job = Job(max_failures=5)
    members = job.start()
    spare = job.newcomer()
    for number, member in enumerate(members):
        job.arrive(member, error=f"TypeError: {number}")
    for number, member in enumerate(members):
        assert job.last(member) == {
            "kind": "evicted",
            "failures": 1,
            "error": f"TypeError: {number}",
        }
    assert job.membership_table.is_over
    assert job.last(spare) == {"kind": "over"}


def test_a_job_whose_members_have_finished_is_over_for_those_who_wait() -> None:
    job = Job(max_ranks=3)
    members = job.start()
    spare = job.newcomer()
    for member in members:
        job.membership_table.leave(member, is_done=True, now=job.now)
    assert job.kinds(spare)[-1] == "over"
    assert job.kinds(job.newcomer())[0] == "over"


def test_newcomers_go_on_when_all_members_are_lost() -> None:
    job = Job(max_ranks=3)
    members = job.start()
    spare = job.newcomer()
    for member in members:
        job.membership_table.lost(member, job.now)
    assert job.generations[2] == (spare,)


def test_a_newcomer_hears_that_the_job_ends_for_want_of_ranks_though_there_is_room() -> None:
    job = Job(initial_size=1, min_ranks=2, max_ranks=2)
    member = job.join(0)
    job.wait(PATIENCE_SECONDS)
    assert job.last(member)["is_last"]
    newcomer = job.newcomer()
    assert job.last(newcomer) == {
        "kind": "waiting",
        "text": "the job ends: too few ranks were there for too long",
    }
    job.membership_table.leave(member, is_done=False, now=job.now)
    assert job.kinds(newcomer) == ["waiting", "over"]


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    job = Job()
    a, b, c = job.start()
    job.arrive(a, c)
    job.membership_table.leave(b, is_done=False, now=job.now)
    job.membership_table.lost(b, job.now)  # its connection ends
    assert job.generations[2] == (a, c)
    assert job.last(a)["reason"] == f"rank 1 (member {b}) left"


EVENTS = ("arrive", "fail", "newcomer", "lose", "silence", "leave", "finish", "ready", "wait")


class Chaos(Job):
    """A job in which anything happens to anybody."""

    def happen(self, event: str, whom: int) -> None:
        living = self.membership_table.living
        member = living[whom % len(living)] if living else None
        if event == "newcomer":
            self.newcomer()
        elif event == "wait":
            self.wait(float(whom))
        elif member is not None:
            self._happen_to(event, member)
        self.check()

    def _happen_to(self, event: str, member: str) -> None:
        is_member = member in self.membership_table.members
        generation = self.membership_table.number if is_member else 0
        if event in ("arrive", "fail"):
            error = "ValueError: no" if event == "fail" else None
            self.membership_table.arrive(member, generation, error, self.now)
        elif event == "lose":
            self.membership_table.lost(member, self.now)
        elif event == "silence":
            self.now += SILENCE_SECONDS + 1
            for other in self.membership_table.living:
                if other != member:
                    self.membership_table.beat(other, self.now)
            self.membership_table.tick(self.now)
        elif event == "ready":
            self.membership_table.ready(member, generation, self.now)
        else:
            self.membership_table.leave(member, event == "finish", self.now)

    def waits(self, member: str) -> bool:
        """Whether this one has arrived and was not told what comes of it."""
        return self.membership_table._participants[member].has_arrived

    def check(self) -> None:
        """No stall: nobody waits where a generation could be formed."""
        membership_table = self.membership_table
        numbers = sorted(self.generations)
        assert numbers == list(range(1, membership_table.number + 1))
        if not membership_table.number or membership_table.is_over:
            return
        members = [one for one in membership_table.living if one in membership_table.members]
        waiting = [one for one in membership_table.living if self.waits(one)]
        if members and all(one in waiting for one in members):
            assert len(waiting) < membership_table._bounds.min_ranks


@given(
    initial_size=st.integers(1, 4),
    min_ranks=st.integers(1, 3),
    room=st.integers(0, 2),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 12)), max_size=40),
)
@settings(max_examples=300)
def test_whatever_happens_nobody_waits_for_ever(
    initial_size: int, min_ranks: int, room: int, events: list[tuple[str, int]]
) -> None:
    job = Chaos(initial_size=initial_size, min_ranks=min_ranks, max_ranks=min_ranks + room)
    for rank in range(initial_size):
        job.join(rank)
    for event, whom in events:
        job.happen(event, whom)
    number = job.membership_table.number
    for member in job.membership_table.living:
        job._happen_to("arrive", member)
    job.wait(PATIENCE_SECONDS + 1)
    job.check()
    for member in job.membership_table.living:
        kinds = job.kinds(member)
        assert kinds, "nobody said anything to it"
        if member in job.membership_table.members and not job.membership_table.is_over:
            assert job.membership_table.number > number or not job.waits(member)
        else:
            assert kinds[-1] in ("waiting", "over", "late")


def test_the_same_events_make_the_same_generations() -> None:
    def run() -> dict[int, tuple[str, ...]]:
        job = Chaos()
        job.start()
        for number, event in enumerate(EVENTS * 5):
            job.happen(event, 7 * number)
        return job.generations

    assert run() == run()


@pytest.mark.parametrize("generation", [0, 2, 7])
def test_an_arrival_from_another_generation_changes_nothing(generation: int) -> None:
    job = Job()
    a, b, c = job.start()
    job.arrive(a, b)
    job.membership_table.arrive(c, generation, None, job.now)
    assert job.membership_table.number == 1
