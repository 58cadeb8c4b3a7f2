"""Random numbers in a pipeline: before its blocks a step draws the same on every stage.

    microbatch i    before the blocks: seed(i), on each stage      (noise, timesteps, mixing)
                    from the blocks on: seed(i, stage)             (dropout)

Every stage runs the user's step, so the step's own random numbers must agree; those of blocks must
not repeat another stage's. Seeds come from a number that the pipeline's ranks agree on once.
"""

import random
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from lightning_shard.backends.collectives import Collectives

_NUM_SEEDS = 2**32


class StageRandomness:
    """Seeds the generators of Python, numpy and torch for each stage's run of a microbatch.

    Args:
        group: Group of the pipeline's ranks, each of which must construct this. Rank 0's generator
            gives the common number.
        device: Device whose generator is seeded beside the CPU's.
    """

    def __init__(self, group: Collectives, device: torch.device) -> None:
        self._device = device
        drawn = int(torch.randint(_NUM_SEEDS, ()).item())
        self._generator = random.Random(group.broadcast_object(drawn))
        self._batch = 0

    @property
    def state(self) -> list[Any]:
        """What the seeds of later batches come from, as numbers and lists."""
        version, words, second = self._generator.getstate()
        return [version, list(words), second]

    @state.setter
    def state(self, state: list[Any]) -> None:
        version, words, second = state
        self._generator.setstate((version, tuple(words), second))

    def next_batch(self) -> None:
        """Go on to the seeds of another batch; each rank must call."""
        self._batch = self._generator.randrange(_NUM_SEEDS)

    def begin(self, microbatch: int) -> None:
        """Seed the generators as every stage does for this microbatch."""
        self._seed(microbatch, 0)

    def enter(self, microbatch: int, stage: int) -> None:
        """Seed the generators as no other stage does for this microbatch."""
        if stage > 0:
            self._seed(microbatch, stage)

    def _seed(self, microbatch: int, stage: int) -> None:
        digest = blake2b(f"{self._batch} {microbatch} {stage}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest)
        # torch.manual_seed would also queue a seed, with a traceback, for every absent accelerator
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
