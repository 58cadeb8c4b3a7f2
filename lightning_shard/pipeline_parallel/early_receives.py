"""Receives that are posted early, so that a message has arrived when the rank needs it.

    as published    0B0  0F2 0SEND_F2  0RECV_B1  0B1
    early           0RECV_B1  0B0  0F2 0SEND_F2  0B1

A message whose receive is not posted stays with its sender, and then takes as long as two messages.
Only for backends that match messages by their tags: where they go in the order of
posting, as with NCCL, a receive that stands before a send that its peer waits for is a deadlock.
"""

from dataclasses import replace

from lightning_shard.pipeline_parallel.schedules import Action, Schedule

_AHEAD = 2  # computations: the one that the peer works at now, and its answer


def with_early_receives(schedule: Schedule) -> Schedule:
    """Return a schedule that does the same, and posts each receive two computations earlier.

    The receive of a gradient stays behind the send of the activation that it belongs to.
    """
    return replace(schedule, actions=tuple(map(_early, schedule.actions)))


def _early(row: tuple[Action, ...]) -> tuple[Action, ...]:
    moved: list[Action] = []
    for action in row:
        place = len(moved)
        if action.kind.startswith("RECV"):
            place = _place(moved, action)
        moved.insert(place, action)
    return tuple(moved)


def _place(before: list[Action], receive: Action) -> int:
    """Return the earliest index in the actions before a receive at which it can stand."""
    place, passed = len(before), 0
    while place and passed < _AHEAD and not _must_precede(before[place - 1], receive):
        place -= 1
        passed += before[place].computes
    return place


def _must_precede(action: Action, receive: Action) -> bool:
    """Whether an action has to stay before a receive: receives keep their order."""
    answers = receive.kind == "RECV_B" and (action.stage, action.microbatch) == (
        receive.stage,
        receive.microbatch,
    )
    return answers or action.kind.startswith("RECV")
