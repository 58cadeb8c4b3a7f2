"""What a stage draws: the same before its blocks on every stage, and its own from there on."""

import random

import numpy as np
import pytest
import torch

from lightning_shard.pipeline_parallel.needs import StageRandomness
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

Draws = tuple[float, float, float]


def make_randomness() -> StageRandomness:
    group = all_ranks()
    return StageRandomness(group, torch.device("cpu"))


def draw() -> Draws:
    return torch.rand(()).item(), float(np.random.random()), random.random()


def _draws(rank: int) -> list[tuple[Draws, Draws]]:
    randomness = make_randomness()
    found = []
    for batch in range(2):
        randomness.next_batch()
        for microbatch in range(2):
            torch.manual_seed(rank + batch)
            randomness.begin(microbatch)
            before = draw()
            randomness.enter(microbatch, rank)
            found.append((before, draw()))
    return found


def test_stages_draw_the_same_before_their_blocks_and_nothing_twice_after() -> None:
    first, second = run_ranks(_draws, 2)
    assert [before for before, _ in first] == [before for before, _ in second]
    inside = [draws for _, draws in first + second]
    for generator in zip(*inside, strict=True):
        assert len(set(generator)) == len(inside)


def test_no_seed_is_queued_for_an_accelerator_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def queue(seed: int) -> None:
        raise AssertionError("torch keeps the seed and a traceback for ever")

    def seed_once(rank: int) -> None:
        randomness = make_randomness()
        with monkeypatch.context() as patches:
            patches.setattr(torch.cuda, "manual_seed_all", queue)
            randomness.begin(0)

    run_ranks(seed_once, 1)
