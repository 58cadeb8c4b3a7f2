"""The batch sampler of elastic training: an epoch's samples, each once, whatever ranks there are.

A position is counted in samples of the epoch's order, by steps that the optimizer has made. What
workers have merely fetched ahead counts for nothing: they are asked anew from the position.

It is put into a DataLoader that exists; all else of that stays.

    Lightning: DataLoader(sampler=DistributedSampler) ──find_order──> the whole epoch's order
                          ^                                                   │
                          └──────install── ElasticBatchSampler <──────────────┘

torch forbids it because running workers would not notice. Here none run.

Private names, checked with torch 2.13 and lightning 2.6; `tests/elastic/test_data_loaders.py` fails
when one changes: the `_iterator` of a DataLoader, the `_sampler` within DistributedSamplerWrapper.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from lightning_shard.elastic.epoch_order import EpochOrder, Position
from lightning_shard.elastic.shares import EpochShares
from lightning_shard.errors import ConfigError


class ElasticBatchSampler(Sampler[list[Any]]):
    """This rank's batches of an epoch, from where it is taken up.

    Either the samples of a step are given, and the accumulation follows from the number of ranks;
    or the accumulation is given, and a step has as many samples as all ranks together take.
    """

    def __init__(
        self,
        sampler: EpochOrder,
        *,
        rank_batch: int,
        rank: int = 0,
        num_ranks: int = 1,
        global_batch: int | None = None,
        accumulation: int | None = None,
        drop_last: bool = False,
        max_samples: int | None = None,
        step_batches: int = 1,
        in_order: bool = False,
    ) -> None:
        if (global_batch is None) == (accumulation is None):
            raise ConfigError(
                f"Expected one of global_batch and accumulation, got {global_batch=} and "
                f"{accumulation=}: the one gives the other."
            )
        given = {"rank_batch": rank_batch, "global_batch": global_batch}
        given |= {"accumulation": accumulation, "max_samples": max_samples}
        given |= {"step_batches": step_batches}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        self.sampler = sampler
        self.rank_batch = rank_batch
        self.drop_last = drop_last
        self._max_samples = max_samples
        self._step_batches = step_batches
        self._in_order = in_order  # micro-batches of one size, by their numbers
        self._global_batch = global_batch
        self._accumulation = accumulation
        self.rescale(rank, num_ranks)

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        if self._global_batch is not None:
            return self._global_batch
        assert self._accumulation is not None
        return self.rank_batch * self.num_ranks * self._accumulation

    @property
    def accumulation(self) -> int:
        """Microbatches of an optimizer step on every rank; the Trainer must accumulate as many."""
        return self.shares.accumulation

    @property
    def num_samples(self) -> int:
        """The samples of an epoch; `drop_last` may leave some of them out."""
        length = len(self.sampler)
        return length if self._max_samples is None else min(length, self._max_samples)

    @property
    def holds_global_batch(self) -> bool:
        """Whether a step has as many samples at every number of ranks."""
        return self._global_batch is not None

    @property
    def shares(self) -> EpochShares:
        """The present epoch from where it is taken up, assigned to the present ranks."""
        start = self.sampler.start
        return EpochShares(
            num_samples=self.num_samples,
            step_samples=self.global_batch,
            num_ranks=self.num_ranks,
            rank_batch=self.rank_batch,
            drop_last=self.drop_last,
            samples_done=start.samples,
            steps_done=start.steps,
            step_batches=self._step_batches,
            in_order=self._in_order,
        )

    def rescale(self, rank: int, num_ranks: int) -> None:
        """Assign to another number of ranks, from the position of its `sampler` on."""
        if not 0 <= rank < num_ranks:
            raise ConfigError(
                f"Rank {rank} of {num_ranks} does not exist, expected 0 <= rank < num_ranks."
            )
        self.rank = rank
        self.num_ranks = num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; has no effect on the present one."""
        self.sampler.set_epoch(epoch)

    def position(self, steps_done: int) -> Position:
        """Where training is after so many optimizer steps of the present epoch."""
        samples = self.shares.begin(steps_done)
        return Position(epoch=self.sampler.epoch, samples=samples, steps=steps_done)

    def weight(self, step_in_epoch: int, microbatch: int) -> float:
        """Return the factor by which this rank scales a microbatch's mean loss."""
        return self.shares.step(step_in_epoch).weight(microbatch, self.rank)

    def weight_of_batch(self, batch_in_epoch: int) -> float:
        """Return `weight` of this rank's batch, counted from the epoch's start as `len` counts."""
        step, microbatch = divmod(batch_in_epoch, self.accumulation)
        return self.weight(step, microbatch)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's batches from the position on, of when the first is asked for."""
        order, shares, rank = self.sampler.indices(), self.shares, self.rank
        for step in shares.steps:
            begin, assigned = shares.begin(step), shares.step(step)
            for microbatch in range(assigned.num_microbatches):
                yield [order[begin + place] for place in assigned.places(microbatch, rank)]

    def __len__(self) -> int:
        """This rank's batches in the epoch: the steps done, as if of this size, and those left."""
        return self.shares.num_batches


def find_order(loader: object, seed: int = 0) -> EpochOrder:
    """Return the order in which a training loader's samples would be seen on a single device.

    Where Lightning has wrapped a user's sampler, which it would have shuffled, the user's counts.
    """
    checked = _assignable(loader)
    if isinstance(checked.batch_sampler, ElasticBatchSampler):
        return checked.batch_sampler.sampler
    sampler: Any = checked.sampler
    if has_own_batches(checked):
        sampler = checked.batch_sampler.sampler  # type: ignore[union-attr]
    if isinstance(sampler, DistributedSamplerWrapper):
        sampler = sampler.dataset._sampler  # type: ignore[attr-defined]
    return EpochOrder(sampler, seed)


def install(loader: DataLoader[Any], batch_sampler: ElasticBatchSampler) -> Callable[[], None]:
    """Let a loader ask `batch_sampler`; return what gives it its own samplers back.

    Its `batch_size` and `drop_last` stay the user's.
    """
    remove = partial(replace_samplers, loader, loader.sampler, loader.batch_sampler)
    replace_samplers(loader, batch_sampler.sampler, batch_sampler)
    return remove


def has_own_batches(loader: object) -> bool:
    """Whether a loader was made with a batch sampler."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_size is None
        and loader.batch_sampler is not None
    )


def batches_asked_for(loader: DataLoader[Any]) -> tuple[int, bool]:
    """Return the user's `batch_size` and `drop_last`, of the loader or of its batch sampler."""
    own: Any = loader.batch_sampler
    if isinstance(own, BatchSampler):
        return own.batch_size, own.drop_last
    size: Any = loader.batch_size or getattr(own, "rank_batch", 1)
    return size, loader.drop_last


def replace_samplers(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> None:
    """Set what torch refuses to set on a loader that is made; no iterator of it may go on."""
    object.__setattr__(loader, "sampler", sampler)
    object.__setattr__(loader, "batch_sampler", batch_sampler)
    loader._iterator = None  # persistent workers' would ask the sampler of before


def _assignable(loader: object) -> DataLoader[Any]:
    """Return the loader, or say why its samples cannot be assigned."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
        raise ConfigError(
            f"Elastic training assigns an epoch's samples anew when ranks come or go, got a stream "
            f"(of type {what}) whose samples have no number. Use a torch DataLoader over a dataset "
            f"with __getitem__ and __len__."
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            "Elastic training makes batches of other sizes when ranks come or go, got a DataLoader "
            "with batch_size=None, which leaves batches to the dataset. Let the dataset return "
            "single samples, and pass batch_size and, if need be, collate_fn."
        )
    if type(loader.batch_sampler) not in (BatchSampler, ElasticBatchSampler):
        kind = type(loader.batch_sampler)
        raise ConfigError(
            f"Elastic training makes batches of other sizes when ranks come or go, got a batch "
            f"sampler of type {kind.__module__}.{kind.__qualname__}, whose batches it would have "
            f"to change. Pass the order of the samples as torch's DataLoader(sampler=..., "
            f"batch_size=...)."
        )
    return loader
