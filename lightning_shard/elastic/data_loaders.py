"""Put an elastic batch sampler into a DataLoader that exists; all else of it stays.

    Lightning: DataLoader(sampler=DistributedSampler) ──find_order──> the whole epoch's order
                          ^                                                   │
                          └──────install── ElasticBatchSampler <──────────────┘

torch forbids it because running workers would not notice. Here none run.

Private names, checked with torch 2.13 and lightning 2.6; `tests/elastic/test_data_loaders.py` fails
when one changes: the `_iterator` of a DataLoader, the `_sampler` within DistributedSamplerWrapper.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_shard.elastic.elastic_sampler import ElasticBatchSampler
from lightning_shard.elastic.epoch_order import EpochOrder
from lightning_shard.errors import ConfigError


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
