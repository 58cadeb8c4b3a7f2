"""Checks by digests that ranks which share every layer are given the same batch.

Parts of layers that work on different samples silently give wrong results, and ranks with batches
of different shapes wait for each other for ever. So each rank digests its batch before it is used,
and the ranks of the group compare: the batches 0, 1, 2, 4, 8 ... of each loader, which finds a
wrong sampler at once and a rare difference in the end, at a cost that soon is nothing.
"""

from collections import Counter
from typing import Any

import torch

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import digest


class SameBatches:
    """Compares the batches of the ranks of a tensor-parallel group.

    Args:
        group: Group of the tensor-parallel ranks.
        ranks: Global rank of each of the group's ranks.
        device: Where the message lies.
    """

    def __init__(self, group: Collectives, ranks: tuple[int, ...], device: torch.device) -> None:
        self._group = group
        self._ranks = ranks
        self._device = device
        self._seen: Counter[str] = Counter()

    def check(self, batch: Any, loader: str) -> None:
        """Take the next batch of a loader; each rank of the group must call.

        Args:
            batch: Tensors, arrays, texts and numbers in any containers; others are not compared.
            loader: Name of the loader that the batch comes from.

        Raises:
            ConfigError: The batches differ; raised on every rank.
        """
        index = self._seen[loader]
        self._seen[loader] += 1
        if index & (index - 1):
            return
        own = torch.tensor([digest(batch)], device=self._device)
        all_digests = own.new_empty(self._group.size)
        self._group.all_gather(all_digests, own).wait()
        digests = all_digests.tolist()
        strangers = [
            str(rank)
            for rank, other in zip(self._ranks, digests, strict=True)
            if other != digests[0]
        ]
        if strangers:
            raise ConfigError(
                f"Rank {self._ranks[self._group.rank]}: the ranks "
                f"{', '.join(map(str, self._ranks))} share every layer and must be given the same "
                f"batches, but batch {index} of {loader} on rank {', '.join(strangers)} is not "
                f"that of rank {self._ranks[0]}. Leave the sampler to the Trainer, or make your "
                f"own from trainer.distributed_sampler_kwargs and one seed; where samples are "
                f"changed at random, call seed_everything(seed, workers=True)."
            )
