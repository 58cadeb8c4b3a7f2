"""A resumed fit goes on where it was: at the next batch, and with the same random numbers.

    uninterrupted   A make iterators   B draw the order, b0 b1 b2   S b3 ...
    saved after b2                                                  A, B, S of each rank
    resumed         A make iterators   B draw the order, b0 b1 b2   S b3 ...
                                         fetched and dropped

Batches that were trained on are fetched once more, so that whatever draws their order, and workers
that augment them, come to be where they were. On the same mesh a loader, data module, sampler or
dataset that has loaded a state goes there by itself, and nothing is dropped, unless Lightning has
wrapped the loader's sampler. Where the mesh has changed, the order is drawn as rank 0 has drawn it,
and the streams are those of the new run; as many samples are dropped as were given.

What a checkpoint holds beside Lightning's and torch's entries is its section `lightning_shard`,
for all ranks (compression's steps) and for each (random streams, place in the data, residuals).
After a fit each rank keeps its own, for a checkpoint that is saved then.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import tree_map_only

from lightning_shard.checkpoint import by_rank
from lightning_shard.checkpoint.random_state import (
    generator_state,
    load_generator_state,
    load_random_state,
    random_state,
)
from lightning_shard.checkpoint.run_folders import CheckpointedRun
from lightning_shard.checkpoint.section import section_of
from lightning_shard.checkpoint.streamed import StreamedFile
from lightning_shard.core.extensions import instead
from lightning_shard.data_parallel.compression.state import (
    load_state,
    own_state,
    shared_by_all,
    with_means,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.pipeline_parallel.containers import digest
from lightning_shard.strategies.trainer._lightning import (
    around_validation,
    before_making_iterators,
    begin_validation_anew,
    count_batches_anew,
    end_saved_epoch,
    iterators_of,
    load_loader_states,
    loader_states,
    skip_batches,
    training_loaders,
)

_PARTS = ("sampler", "batch_sampler", "dataset")  # of a loader, which may have a place
_HOLDERS = (*_PARTS, "_sampler", "batches")  # of loaders, samplers and what wraps them
_HOOKS = ("state_dict", "load_state_dict")
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"
PLACE_ENTRIES = ("random", "data", "loaders")
"""By what names a rank keeps its place, see `PlaceInData.state`."""


class PlaceInData:
    """One rank's place in the training data and its random streams, in a fit."""

    def __init__(
        self,
        trainer: "pl.Trainer",
        device: torch.device,
        besides: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._trainer, self._device, self._besides = trainer, device, besides
        self._at_iterators: Mapping[str, Any] = {}  # the streams before iterators were made
        self._at_order: Mapping[str, Any] = {}  # before the first batch of the epoch was drawn
        self._at_validation: Mapping[str, Any] = {}  # before one that an error has ended
        self._resumed: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._is_of_this_mesh = True  # what was resumed from
        self._is_led = False  # whether samplers are at their place since their generators are
        self._num_to_drop: int | None = None  # batches, where those of the loop are no measure

    def state(self) -> dict[str, Any]:
        """Return the random streams now, and at the beginning of the epoch's data."""
        if self._resumed is not None:  # loaded, and not gone on from
            return {"random": self._resumed[0], "data": self._resumed[1], **self._besides()}
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        data: dict[str, Any] = {"iterators": self._at_iterators, "order": self._at_order}
        if progress.current.ready == 0:
            data["is_at_first"] = True  # stopped before the first batch of an epoch
        data["parts"] = _states_of_parts(self._trainer)
        if (samples := _samples_of_a_batch(self._trainer)) is not None:
            data["samples_of_a_batch"] = samples
        is_within = bool(self._at_order) and not progress.is_last_batch
        random = self._at_validation or {"random": self._now(), **self._besides()}
        own = {**random, "data": data if is_within else {}}
        loaders = loader_states(self._trainer)
        return own | {"loaders": loaders} if loaders else own

    def go_on(self, own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        """Note the place to go on from, until the fit begins."""
        self._resumed = own.get("random", {}), (own or first).get("data", {})
        self._is_of_this_mesh = bool(own)
        # Another mesh has other shares of the data: batches are dropped there.
        load_loader_states(self._trainer, own.get("loaders", ()))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Go on from the noted place inside, in which the fit runs."""
        loop = self._trainer.fit_loop
        with ExitStack() as stack:
            stack.enter_context(before_making_iterators(self._trainer, self._note_iterators))
            stack.enter_context(around_validation(self._trainer, self._validating))
            for owner, name, call in (
                (loop, "reset", self._begin_fit),
                (loop, "on_advance_start", self._before_epoch),
                (loop.epoch_loop, "reset", self._without_warning),
                (loop.epoch_loop, "on_run_start", self._begin_epoch),
            ):
                stack.enter_context(instead(owner, name, call))
            yield

    @contextmanager
    def _validating(self) -> Iterator[None]:
        """Let one that is cut short be done anew, from its first batch."""
        before = {"random": self._now(), **self._besides()}
        try:
            yield
        except BaseException:
            if begin_validation_anew(self._trainer):
                self._at_validation = before
            raise

    def _now(self) -> dict[str, Any]:
        states = [generator_state(one) for one in _generators(self._trainer)]
        return random_state(self._device) | ({"generators": states} if states else {})

    def _load(self, state: Mapping[str, Any]) -> None:
        if state:
            load_random_state(state, self._device)
        pairs = zip(_generators(self._trainer), state.get("generators", ()), strict=False)
        for generator, one in pairs:
            load_generator_state(generator, one)

    def _note_iterators(self) -> None:
        if self._resumed is not None and not self._places_itself():
            load_loader_states(self._trainer, ())
        self._at_iterators = self._now()

    def _begin_fit(self, reset: Callable[[], None]) -> None:
        reset()
        if self._resumed is not None:
            self._count_samples(self._resumed[1])
            end_saved_epoch(self._trainer)

    def _count_samples(self, data: Mapping[str, Any]) -> None:
        """Go on behind the samples that were given, in batches of another size, too."""
        before, now = data.get("samples_of_a_batch"), _samples_of_a_batch(self._trainer)
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if before is None or now is None or before == now or self._places_itself():
            return
        given = progress.current.ready * before
        num_batches, within = given // now, self._trainer.accumulate_grad_batches
        if progress.current.ready % within == 0:  # saved behind a step
            num_batches -= num_batches % within
        if repeated := given - num_batches * now:
            rank_zero_warn(
                f"The checkpoint was saved after {given} samples of an epoch, in batches of "
                f"{before} on all ranks together; this run takes {now}. It goes on after "
                f"{num_batches * now} samples: {repeated} are trained on once more. Resume with "
                f"the same batch on all ranks together, or from a checkpoint of an epoch's end, to "
                f"have each sample once."
            )
        if isinstance(self._trainer.limit_train_batches, int):  # of this many batches in any case
            self._num_to_drop = num_batches
        else:
            count_batches_anew(self._trainer, num_batches)

    def _before_epoch(self, advance: Callable[[], None]) -> None:
        if self._resumed is not None:
            was_there = self._places_itself()
            self._load(self._resumed[0])
            self._is_led = not was_there and self._places_itself()
        advance()

    def _without_warning(self, reset: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            if self._resumed is not None and not self._places_itself():
                warnings.filterwarnings("ignore", _NOT_RESUMABLE)
            reset()

    def _begin_epoch(self, begin: Callable[[Any], None], fetcher: Any) -> None:
        """Make the epoch's iterators and draw its order, as it was if the fit was resumed."""
        resumed, self._resumed = self._resumed, None
        before, iterators = self._now(), iterators_of(fetcher)
        if resumed is not None and not self._places_itself():
            self._return_to(*resumed, fetcher)
            begin(fetcher)
            return
        begin(fetcher)
        if iterators_of(fetcher) is not iterators:
            self._at_iterators = before
        self._at_order = self._now()

    def _return_to(self, now: Mapping[str, Any], data: Mapping[str, Any], fetcher: Any) -> None:
        counted = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        num_batches = counted if self._num_to_drop is None else self._num_to_drop
        self._num_to_drop = None
        has_begun = counted > 0 or data.get("is_at_first", False)
        if has_begun:
            self._load(data.get("iterators", {}))
        self._at_iterators = self._now()
        iter(fetcher)
        if has_begun:
            self._load(data.get("order", {}))
        self._at_order = self._now()
        skip_batches(fetcher, num_batches)
        if has_begun:
            self._load(now)

    def _places_itself(self) -> bool:
        """Whether user code brings the data to its place."""
        owner: Any = self._trainer
        data = owner.datamodule
        if data is not None and is_overridden("load_state_dict", data, pl.LightningDataModule):
            return True
        loaders = training_loaders(self._trainer)
        if any(map(_has_place, loaders)):
            # What wraps another's sampler draws its order anew each time it is asked.
            owners = [*loaders, *(getattr(one, "batch_sampler", None) for one in loaders)]
            samplers = [getattr(one, "sampler", None) for one in owners]
            is_drawn_anew = any(isinstance(one, DistributedSamplerWrapper) for one in samplers)
            return self._is_of_this_mesh and not is_drawn_anew
        parts = _states_of_parts(self._trainer)
        saved = {} if self._resumed is None else self._resumed[1]
        return bool(parts) and not self._is_led and saved.get("parts", parts) == parts


def _samples_of_a_batch(trainer: "pl.Trainer") -> int | None:
    """Return how many samples all ranks together are given at once; None where nobody can tell."""
    loaders = training_loaders(trainer)
    if len(loaders) != 1:
        return None
    (loader,) = loaders
    own = getattr(loader, "batch_size", None)
    if own is None:
        own = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    alone = 1 if (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1) == 1 else None
    ranks = getattr(getattr(loader, "sampler", None), "num_replicas", alone)
    return own * ranks if isinstance(own, int) and isinstance(ranks, int) else None


def _states_of_parts(trainer: "pl.Trainer") -> list[int]:
    """Digest the states of samplers and datasets that have one, by which their place is known."""
    loaders = training_loaders(trainer)
    parts: list[Any] = [getattr(one, part, None) for one in loaders for part in _PARTS]
    return [digest(one.state_dict()) for one in parts if _has_place(one)]


def _has_place(one: Any) -> bool:
    return all(hasattr(one, hook) for hook in _HOOKS)


def _generators(trainer: "pl.Trainer") -> list[Any]:
    """Return what loaders, samplers and datasets draw from for themselves, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = training_loaders(trainer)
    while waiting:
        attributes = getattr(waiting.pop(), "__dict__", {})
        found |= {id(one): one for one in attributes.values() if generator_state(one) is not None}
        waiting += [attributes[name] for name in _HOLDERS if name in attributes]
    return list(found.values())


class KeptState:
    """What one rank keeps for checkpoints, of the run that asks, in a fit and after it."""

    def __init__(self) -> None:
        self._place: PlaceInData | None = None  # of a fit
        self._shared: Mapping[str, Any] = {}  # of the last fit; on rank 0
        self._own: Mapping[str, Any] = {}  # of the last fit

    def following(
        self, run: CheckpointedRun, trainer: "pl.Trainer"
    ) -> AbstractContextManager[None]:
        """Inside, note the place in the data, and go on from one that is loaded."""
        self._place = PlaceInData(trainer, run.device, partial(_random_dimensions, run.dimensions))
        return self._place.inside()

    def tear_down(self) -> None:
        """Forget the fit's place in the data."""
        self._place = None

    def _own_state(self, run: CheckpointedRun, engine: DataParallelEngine) -> dict[str, Any]:
        """Return what this rank goes on from; no communication, and no copies."""
        own = _random_dimensions(run.dimensions) if self._place is None else self._place.state()
        if compression := own_state(engine.exchanges):
            own["compression"] = compression
        return {**own, **run.kept_besides()}

    def entries(
        self, run: CheckpointedRun, file: StreamedFile | None, *, is_fitting: bool
    ) -> dict[str, Any]:
        """Return the section's entries, of this fit or the last; each rank must call."""
        shared, own, engine = self._shared, self._own, run.engine
        if is_fitting and engine is not None:
            shared, own = shared_state(engine), self._own_state(run, engine)
        if not run.is_folder:
            return {**shared, **_gathered(run, own, file)}
        return {**shared, **(by_rank.entry_alone(own, run.mesh, run.rank) if own else {})}

    def keep(self, run: CheckpointedRun, *, failed: bool) -> None:
        """At the end of a fit, keep its state for checkpoints that are saved later; collective."""
        self._shared, self._own = {}, {}
        if failed:
            return
        assert run.engine is not None
        shared = shared_state(run.engine)
        own = self._own_state(run, run.engine)
        if run.is_in_process:
            self._shared = {**shared, **_gathered(run, own)}
        else:
            self._shared, self._own = shared, tree_map_only(torch.Tensor, host_copy, own)

    def load(self, run: CheckpointedRun, checkpoint: Mapping[str, Any]) -> None:
        """Go on from what the ranks have kept; no communication."""
        section = section_of(checkpoint)
        own = by_rank.own_entry(section, run.mesh, run.rank)
        assert run.engine is not None
        compressor = run.engine.options.compression
        if compressor is not None:
            kept = [entry.get("compression", {}) for _, entry in by_rank.entries_of_ranks(section)]
            shared = with_means(section.get("compression", {}), kept)
            exchanges = run.engine.exchanges
            load_state(compressor, exchanges, shared, own.get("compression"))
        for one in run.dimensions:
            if one.axis in own:
                one.random_state = by_rank.in_memory(own[one.axis]["random"])
        if self._place is not None:
            self._place.go_on(_of_place(own), _of_place(section.get("rank_0", {})))


def _of_place(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank's place in the data is made of, in memory: its checkpoint may go."""
    return {key: by_rank.in_memory(entry[key]) for key in PLACE_ENTRIES if key in entry}


def shared_state(engine: DataParallelEngine) -> dict[str, Any]:
    """Return what counts for all ranks, on rank 0; no communication."""
    if engine.options.compression is None or not engine.is_first:
        return {}
    return {"compression": shared_by_all(engine.options.compression, engine.exchanges)}


def _random_dimensions(dimensions: Sequence[Any]) -> dict[str, Any]:
    """Return what dimensions draw their own random numbers from, by axis."""
    states = {one.axis: one.random_state for one in dimensions}
    return {axis: {"random": state} for axis, state in states.items() if state is not None}


def _gathered(
    run: CheckpointedRun, own: Mapping[str, Any], file: StreamedFile | None = None
) -> dict[str, Any]:
    group = run.ranks
    if not own or group is None:
        return {}
    return by_rank.gather_entries(own, run.mesh, group, run.device, file)
