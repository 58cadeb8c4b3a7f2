"""Buffers (running statistics, codebooks, counters ...) follow rank 0 during training.

    forward | backward | forward | backward | step |   forward
       each rank has its own, as it has its own gradients    └─ rank 0's, then its own again

Ranks follow at the start of the first step after an optimizer's, of training or evaluation, and
never while gradients are accumulated: hooks before the step find what each rank has counted. Of
those outside the `state_dict`, and of whole numbers, only those follow that have been seen to
change on some rank and have one size on all, so constant masks and caches cost nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from zlib import crc32

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.states import State
from lightning_shard.data_parallel.graph_borders import KnownModules
from lightning_shard.data_parallel.torch_private import is_persistent, with_buffers
from lightning_shard.data_parallel.views.tensor_properties import VERSION

_Key = tuple[int, str]  # a module's place among all, and a buffer's name in it
_PLACES = 1024  # of two buffers that share one, both follow where one changes


class Updated(State):
    """Whether an optimizer has stepped since buffers followed."""

    UNKNOWN = "AWAITED DONE"  # the model has no optimizer, whose steps to wait for
    AWAITED = "AWAITED DONE"
    DONE = "AWAITED DONE"


class Differ(State):
    """Whether ranks' buffers may differ."""

    NOT = "MAYBE DUE"
    MAYBE = "NOT MAYBE DUE"
    DUE = "NOT MAYBE DUE"  # they may, and the next step begins with rank 0's


class BufferSync:
    """Broadcasts a model's buffers from rank 0; modules may replace them at any time."""

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._model, self._modules = model, KnownModules(model)
        self._collectives = collectives
        self._differ, self._updated = Differ.NOT, Updated.UNKNOWN
        self._seen: dict[_Key, tuple[Tensor, int]] = {}  # others, with their version then
        self._moving: set[_Key] = set()  # of others those that some rank has changed
        self._num_follows = 0
        self._begins_step = False  # where bits do not depend on ranks
        self._at_step: dict[_Key, Tensor] = {}
        self._of_first: dict[_Key, Tensor] = {}

    def broadcast_all(self) -> None:
        """Take over every buffer of rank 0; each rank must call."""
        self._broadcast([buffer for buffer in self._model.buffers() if buffer.numel()])
        self._seen = self._others()

    def follow(self, *, exchanged: bool) -> None:
        """At the start of a step, take over rank 0's changing buffers; each rank must call.

        Rank 0 says whether an optimizer has stepped: another may have left its step out.
        `exchanged` says whether gradients have travelled since the last step.
        """
        if (self._differ is Differ.DUE or exchanged) and self._collectives.size > 1:
            self._notice_moving()
            self._broadcast(self._following(), follows=self._updated is not Updated.AWAITED)
            if self._updated is Updated.DONE:
                self._updated = self._updated.to(Updated.AWAITED)
        if self._differ is Differ.DUE:
            self._differ = self._differ.to(Differ.MAYBE)
        if self._begins_step:
            self._begins_step = False
            self._at_step = {key: one.clone() for key, one, _ in self._each()}

    def note_update(self, *, ends: bool) -> None:
        """Note that an optimizer will step on this model, or (`ends`) that it has."""
        if ends or self._updated is Updated.UNKNOWN:
            self._updated = self._updated.to(Updated.DONE if ends else Updated.AWAITED)

    def learnt(self) -> tuple[bool, bool | None, int, list[_Key], list[_Key]]:
        """Return what the next follow goes by; see `go_on`."""
        changed = self._changed(self._others())
        due, moving = self._differ is Differ.DUE, sorted(self._moving)
        stepped = None if self._updated is Updated.UNKNOWN else self._updated is Updated.DONE
        return due, stepped, self._num_follows, moving, changed

    def go_on(
        self,
        due: bool,
        stepped: bool | None,
        follows: int,
        moving: Iterable[_Key],
        changed: Iterable[_Key],
    ) -> None:
        """Follow as another object would have, on whose ranks buffers had these values."""
        words = {None: Updated.UNKNOWN, False: Updated.AWAITED, True: Updated.DONE}
        self._differ, self._updated = Differ.DUE if due else Differ.NOT, words[stepped]
        self._num_follows, self._moving = follows, set(moving)
        self._seen = {key: one for key, one in self._others().items() if key not in set(changed)}

    def note_training(self, *, exchanges: bool) -> None:
        """Note that a step of training begins, which may change buffers."""
        if exchanges or self._differ is Differ.NOT:
            self._differ = self._differ.to(Differ.DUE if exchanges else Differ.MAYBE)

    def end(self) -> None:
        """Take over rank 0's buffers where training has changed them; each rank must call."""
        if self._differ is not Differ.NOT:
            self.broadcast_changing()
            self._differ = self._differ.to(Differ.NOT)

    def broadcast_changing(self) -> None:
        """Take over those of rank 0's buffers that training changes; each rank must call."""
        self._notice_moving(always=True)
        self._broadcast(self._following())

    def begin_micro_batch(self, *, is_first: bool) -> None:
        """Where bits do not depend on ranks, let the next `follow` note how a step begins."""
        self._begins_step = is_first

    @torch.no_grad()
    def end_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Let the next micro-batch begin as this one has; the first one's buffers stay at last."""
        if is_first:
            self._of_first = {key: one.clone() for key, one, _ in self._each()}
        kept = self._of_first if is_last else self._at_step
        for key, one, _ in self._each():
            if key in kept and not torch.equal(one, kept[key]):
                one.copy_(kept[key])

    def changing(self) -> list[Tensor]:
        """Return the statistics that training may change, in the same order on every rank."""
        return [buffer for _, buffer, is_other in self._each() if not is_other]

    def _following(self) -> list[Tensor]:
        each = self._each()
        return [one for key, one, is_other in each if not is_other or key in self._moving]

    def _each(self) -> Iterator[tuple[_Key, Tensor, bool]]:
        """Yield each buffer, and whether it is none of the statistics in the `state_dict`."""
        for place, module in enumerate(with_buffers(self._modules.now())):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.numel():
                    is_statistic = buffer.is_floating_point() and is_persistent(module, name)
                    yield (place, name), buffer, not is_statistic

    def _others(self) -> dict[_Key, tuple[Tensor, int]]:
        return {key: (one, VERSION(one)) for key, one, is_other in self._each() if is_other}

    def _changed(self, now: Mapping[_Key, tuple[Tensor, int]]) -> list[_Key]:
        return [key for key, one in now.items() if not _is_same(self._seen.get(key), one)]

    def _notice_moving(self, *, always: bool = False) -> None:
        """See which others have changed on some rank, ever more seldom; each rank must call."""
        self._num_follows += 1
        is_time = self._num_follows & (self._num_follows - 1) == 0
        now = self._others() if is_time or always else {}
        if not now:
            return
        places = {key: _place(key, one) for key, (one, _) in now.items()}
        marks = torch.zeros(2, _PLACES, dtype=torch.int32)
        marks[0, [places[key] for key in self._changed(now)]] = 1  # changed on this rank
        marks[1] = 1
        marks[1, list(places.values())] = 0  # has another size here, or is not there
        marks = marks.to(next(iter(now.values()))[0].device)
        self._collectives.all_reduce(marks, "max").wait()
        changed, missing = marks.tolist()
        self._moving = {key for key, at in places.items() if changed[at] and not missing[at]} | {
            key for key in self._moving if key in places and not missing[places[key]]
        }
        self._seen = now

    @torch.no_grad()
    def _broadcast(self, buffers: list[Tensor], *, follows: bool = True) -> None:
        """Send rank 0's values, which ranks take over if rank 0 follows."""
        if self._collectives.size == 1:
            return
        for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            word = same[0].new_full((1,), follows)
            flat = torch.cat([word, *(buffer.detach().reshape(-1) for buffer in same)])
            self._collectives.broadcast(flat, src=0).wait()
            # On other devices the host would have to wait, and fake tensors have no word.
            reads = type(flat) is Tensor and flat.device.type == "cpu"
            if reads and not flat[0]:
                continue
            parts = torch.split(flat[1:], [buffer.numel() for buffer in same])
            for buffer, part in zip(same, parts, strict=True):
                value = part.view_as(buffer)
                if not (reads and torch.equal(value, buffer)):  # a graph may hold the buffer
                    buffer.copy_(torch.where(flat[0] != 0, value, buffer))


def _is_same(before: tuple[Tensor, int] | None, now: tuple[Tensor, int]) -> bool:
    return before is not None and before[0] is now[0] and before[1] == now[1]


def _place(key: _Key, buffer: Tensor) -> int:
    return crc32(f"{key} {buffer.numel()}".encode()) % _PLACES
