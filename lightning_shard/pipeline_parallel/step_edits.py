"""Edits of parameters in a training step, which a pipeline runs once for each microbatch and stage.

    before or in the network    every stage edits its own, in each microbatch: right where doing so
                                again changes nothing (clamp_, a renormalized weight), else refused
    before the backward         the gradients are there already: refused
    after the network           the last stage alone comes there, after its first microbatch has
                                been computed: refused

Edits are found by value: `EditMarks`. The first batch is watched step by step, and so are all
others once a batch has edited; else a batch's beginning and end are compared. Buffers:

    spectral_norm's vectors    each microbatch, and what tries a step before the first, starts from
                               those of before the batch, so that they are iterated once per batch
    the module's own, small    once per batch, as the last stage's steps say: `StepAttributes`
    of another stage, by hand  refused: the last stage's steps change what another stage has
    any other                  changed once per microbatch; the first batch tells which, by name
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import parameters_written
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.content import content, sum_of_bits
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.views.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel._torch import OF_COMPILER, iterates_powers
from lightning_shard.pipeline_parallel.staged_model import MAX_FOLLOWED_NUMEL, StagedModel
from lightning_shard.tensor_parallel.dim_sharded_tensor import own_part

_MOST_NAMED = 3  # layers in a warning
_NO_USERS = ("_lightning_shard_", *OF_COMPILER)  # attributes that are not user code's


_Watched = dict[str, tuple[nn.Module, str, Tensor | None]]  # by path, with their values


class StepBuffers:
    """Follows the buffers of a pipeline's own stages through its batches; each rank calls alike."""

    def __init__(
        self, model: StagedModel, group: Collectives, last_stage: int, *, has_last: bool
    ) -> None:
        self._model, self._group = model, group
        self._last_stage, self._has_last = last_stage, has_last
        self._before: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by stage, with their values
        self._after: dict[int, list[Tensor]] = {}
        self._is_known = False

    @contextmanager
    def batch(self, num_microbatches: int, *, training: bool) -> Iterator[None]:
        """Run a batch inside; a change of another stage's buffer is refused on every rank."""
        self._before, self._after = self._iterated() if training else {}, {}
        watched = self._watched() if training and not self._is_known else None
        others = self._others() if watched is not None else {}
        yield
        self._before = {}
        if watched is not None:
            self._is_known = True
            self._model.hide()
            changed = self._changed(watched)
            self._refuse_lost(changed, others)
            if num_microbatches > 1:
                self._tell(changed, num_microbatches)

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Run a stage's forward of one microbatch inside."""
        _write((buffer, value) for buffer, value in self._before.get(stage, ()))
        yield
        if stage in self._before and stage not in self._after:
            self._after[stage] = [buffer.clone() for buffer, _ in self._before[stage]]

    def before_backward(self, stage: int) -> None:
        """Set the vectors to those after the forward, for a checkpoint that computes it again."""
        if stage in self._after:
            buffers = [buffer for buffer, _ in self._before[stage]]
            _write(zip(buffers, self._after[stage], strict=True))

    def _iterated(self) -> dict[int, list[tuple[Tensor, Tensor]]]:
        found: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for module, name, stage in self._model.own_buffers().values():
            buffer = module._buffers[name]
            if iterates_powers(module, name) and buffer is not None:
                found.setdefault(stage, []).append((buffer, buffer.clone()))
        return found

    def _watched(self) -> _Watched:
        """Return the other buffers, with copies of their values."""
        return {
            path: (module, name, _cloned(module._buffers[name]))
            for path, (module, name, _) in self._model.own_buffers().items()
            if not iterates_powers(module, name)
        }

    def _others(self) -> dict[str, Tensor]:
        """Return copies of other stages' buffers as the last stage's steps see them."""
        if not self._has_last:
            return {}
        seen = self._model.other_buffers(self._last_stage)
        return {path: tensor.clone() for path, tensor in seen.items()}

    def _changed(self, watched: _Watched) -> dict[str, tuple[str, str, str]]:
        """Return by path the layer, its class and the name of each changed buffer."""
        return {
            path: (path.rpartition(".")[0] or path, type(module).__name__, name)
            for path, (module, name, before) in watched.items()
            if not _is_same(module._buffers.get(name), before)
        }

    def _refuse_lost(self, own: Collection[str], others: Mapping[str, Tensor]) -> None:
        """Refuse changes by the last stage's steps of what only other stages' own changes count."""
        now = self._model.other_buffers(self._last_stage) if others else {}
        theirs = [path for path in others if not _is_same(now[path], others[path])]
        ranks = self._group.all_gather_object((list(own), theirs))
        theirs = [path for _, found in ranks for path in found]
        lost = sorted(set(theirs) - {path for found, _ in ranks for path in found})
        if lost:
            raise ConfigError(
                f"Update buffers by hand in on_train_batch_end(outputs, batch, batch_idx), or in "
                f"the forward of a module after the blocks, or use strategy='zero2'. training_step "
                f"changes {', '.join(map(repr, lost[:_MOST_NAMED]))} on the last stage of the "
                f"pipeline, but another stage has it, whose steps end before; expected a buffer of "
                f"the last stage, or one of the LightningModule itself of up to "
                f"{MAX_FOLLOWED_NUMEL} elements."
            )

    def _tell(self, own: Mapping[str, tuple[str, str, str]], num_microbatches: int) -> None:
        """Say once which buffers the first batch has changed; each rank must call."""
        every = self._group.all_gather_object(list(own.values()))
        changed = sorted({one for ranks in every for one in ranks})
        layers = {path: kind for path, kind, _ in changed}
        if not layers:
            return
        names = [f"{path!r} ({kind})" for path, kind in layers.items()]
        more = " ..." * (len(names) > _MOST_NAMED)
        buffers = ", ".join(sorted({name for *_, name in changed}))
        rank_zero_warn(
            f"A training step changes buffers ({buffers}) of {', '.join(names[:_MOST_NAMED])}"
            f"{more}, and a pipeline runs it for each of {num_microbatches} microbatches: they are "
            f"updated as often, each time with what one microbatch gives. Set num_microbatches=1 "
            f"for those of a single device."
        )


class BuffersOfFirst(StepBuffers):
    """Lets each microbatch begin with the buffers of the batch's beginning; the first one's stay.

    What a microbatch has changed is left to its backward; a copy of what was there takes its place.
    """

    @override
    @contextmanager
    def batch(self, num_microbatches: int, *, training: bool) -> Iterator[None]:
        self._model.stand_in()  # for the buffers that are there now
        self._stages = {path: stage for path, (_, _, stage) in self._model.own_buffers().items()}
        self._at_start: _Watched = self._watched() if training else {}
        self._of_first: dict[str, Tensor | None] = {}
        with super().batch(num_microbatches, training=training):
            try:
                yield
            finally:
                self._model.hide()
                for path, buffer in self._of_first.items():
                    module, name, _ = self._at_start[path]
                    module._buffers[name] = buffer

    @override
    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        with super().forward(stage):
            yield
        own = {path: one for path, one in self._at_start.items() if self._stages[path] == stage}
        for path in self._changed(own):
            module, name, before = self._at_start[path]
            self._of_first.setdefault(path, module._buffers[name])
            module._buffers[name] = _cloned(before)

    @override
    def _tell(self, own: Mapping[str, tuple[str, str, str]], num_microbatches: int) -> None:
        pass


def _cloned(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _is_same(buffer: Tensor | None, before: Tensor | None) -> bool:
    if buffer is None or before is None:
        return buffer is before
    return buffer.shape == before.shape and torch.equal(buffer, before)


@torch.no_grad()
def _write(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in pairs:
        buffer.copy_(value)


@dataclass(frozen=True, eq=False)
class QuickMarks:
    """The marks of all of a rank's part.

    Attributes:
        sums: For each buffer of parameters its number, shape (), int64.
        num_changes: How often gradients have been changed in place.
        grads: For each parameter what stands in `.grad`.
    """

    sums: Sequence[Tensor]
    num_changes: int
    grads: Sequence[object]

    def equal(self, other: "QuickMarks") -> bool:
        """Whether nothing was edited between the two."""
        are_same = all(one is two for one, two in zip(self.grads, other.grads, strict=True))
        if not are_same or self.num_changes != other.num_changes:
            return False
        if len(self.sums) != len(other.sums):
            return False
        return not self.sums or torch.equal(*(torch.stack(list(o.sums)) for o in (self, other)))


class EditMarks:
    """Reads numbers that change when user code edits a rank's parameters or gradients in any way.

        p.mul_(c)    p.data.clamp_(-c, c)    p.data = ...    p.numpy()[:] = ...    load_state_dict

    Autograd's version counters see the first of these only. So values are compared, by sums over
    their bits: all of a buffer in one pass, or parameter by parameter to find the name. Gradients
    need no mark unless a step `accumulates` them, else they are zeroed before the next one's. What
    user code keeps on parameters as attributes is marked, too.
    """

    def __init__(self, engine: DataParallelEngine, *, accumulates: bool) -> None:
        self._flats, self._shards = engine.flats, engine.shards if accumulates else None
        self._params = dict(engine.model.named_parameters())
        self._kept: list[object] = []
        self._exchanged: dict[str, int] = {}  # how often another tensor has come into `.grad`

    @as_they_are
    @torch.no_grad()
    def quick(self) -> QuickMarks:
        """Return one number for each buffer, and what stands in each `.grad`."""
        sums = [sum_of_bits(part) for flat in self._flats for part in flat.shown_parts()]
        return QuickMarks(sums, self._num_changes, [_what_is(grad) for _, grad in self._grads()])

    @as_they_are
    @torch.no_grad()
    def of_places(self) -> list[int]:
        """Return numbers that change when parameters exchange their values, too; slower."""
        return [int(content(part)) for flat in self._flats for part in flat.shown_parts()]

    @as_they_are
    @torch.no_grad()
    def by_name(self) -> dict[str, object]:
        """Return a number for each parameter and for its gradient."""
        marks = {}
        for flat in self._flats:
            for slot, value in zip(flat.layout.slots, flat.own_values(), strict=True):
                marks[repr(slot.name)] = content(value)
        numbers: dict[str, object] = {name: int(mark) for name, mark in marks.items()}
        for name, param in self._params.items():
            for key, value in vars(param).items():
                if not key.startswith(_NO_USERS):
                    numbers[f"{name}.{key}"] = tuple(map(_mark, tree_leaves(value)))
        numbers["gradients"] = self._num_changes
        self._kept, before = [_what_is(grad) for _, grad in self._grads()], self._kept
        for number, (name, _) in enumerate(self._grads()):
            is_same = not before or before[number] is self._kept[number]
            self._exchanged[name] = self._exchanged.get(name, 0) + (not is_same)
            numbers[f"the gradient of {name!r}"] = self._exchanged[name]
        return numbers

    @property
    def _num_changes(self) -> int:
        return 0 if self._shards is None else self._shards.num_changes

    def _grads(self) -> Iterator[tuple[str, Tensor | None]]:
        for flat in self._flats if self._shards is not None else ():
            for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                yield slot.name, param.grad


def _mark(value: object) -> object:
    """Return what differs where a value does that user code keeps on a parameter."""
    own = own_part(value)
    if type(own) in (Tensor, nn.Parameter) and (own.is_leaf or not own.requires_grad):
        return int(content(own))
    if isinstance(own, Tensor):  # elsewhere, or in the step's graph, with which it ends
        return Tensor
    return own if isinstance(own, int | float | str) else id(own)


def _what_is(grad: Tensor | None) -> object:
    """Return the tensor itself, or the class of the engine's own stand-ins."""
    is_engines = isinstance(grad, AveragedGradient) and grad.own is None
    return AveragedGradient if is_engines else grad


_ADVICE = (
    "Edit parameters and gradients in a hook that comes once per batch: "
    "on_train_batch_start(batch, batch_idx), on_before_optimizer_step(optimizer) or "
    "on_train_batch_end(outputs, batch, batch_idx), where each stage edits its own; or use "
    "strategy='zero2'. "
)


class StepEdits:
    """Watches one rank's parameters through the batches of a pipeline."""

    def __init__(self, model: StagedModel, marks: EditMarks | None) -> None:
        self._model, self._marks = model, marks
        self._is_close = True
        self._in_batch = False
        self._known: dict[str, object] = {}
        self._times: Counter[str] = Counter()

    @contextmanager
    def batch(self, *, training: bool) -> Iterator[None]:
        """Run a batch inside, and refuse edits of parameters that one step would not make."""
        if self._marks is None or not training:
            yield
            return
        self._times, before = Counter(), None
        if self._is_close:
            self._known = self._marks.by_name()
        else:
            before = self._marks.quick()
        with setting(self, _in_batch=True):
            yield
        if before is None:
            self._is_close = bool(self._times)
        elif not before.equal(self._marks.quick()):
            raise ConfigError(
                f"{_ADVICE}training_step has changed parameters of this stage of the pipeline, or "
                f"gradients that are being accumulated, for the first time after the first batch; "
                f"expected it to leave them as they are: it runs for each microbatch."
            )

    @contextmanager
    def step(self, stage: int) -> Iterator[None]:
        """Run the step of one microbatch on one stage inside.

        What is edited a second time is refused, and so are parameters that it freezes or unfreezes.
        """
        before = self._model.trainable
        yield
        self.note(stage)
        if self._in_batch and before != self._model.trainable:
            raise ConfigError(
                f"Stage {stage}: training_step freezes or unfreezes parameters (requires_grad), "
                f"which other stages and microbatches would learn of too late; expected that to "
                f"stay as it is in a step of a pipeline. Do it in "
                f"on_train_batch_start(batch, batch_idx), or use strategy='zero2'."
            )

    def note(self, stage: int) -> None:
        """Count the edits since the last time, at the end of a step or of a trial of one."""
        again = [name for name in self._edited() if self._times[name] > 1]
        if again:
            raise ConfigError(
                f"{_ADVICE}Stage {stage}: training_step changes {_listed(again)} again in each "
                f"microbatch, expected one change per batch."
            )

    @contextmanager
    def leaving(self, stage: int, lent: Sequence[Tensor]) -> Iterator[None]:
        """Run what comes after the network, on the last stage, inside."""
        if not self._in_batch:
            yield
            return
        self.note(stage)
        before = [sum_of_bits(one) for one in lent]
        with parameters_written() as written:
            yield
        late = [*self._edited(), *map(repr, written)]
        if before and not torch.equal(
            torch.stack(before), torch.stack([sum_of_bits(one) for one in lent])
        ):
            late.append("parameters of other stages that it has borrowed")
        if late:
            raise ConfigError(
                f"{_ADVICE}Stage {stage}: training_step changes {_listed(late)} after the last "
                f"block of the network, where only the last stage of the pipeline comes, once for "
                f"each microbatch; expected parameters to stay as they are there."
            )

    def watched_until_backward(self) -> Callable[[], None]:
        """Return what raises ConfigError if parameters have changed since; for the backward."""
        if self._marks is None:
            return lambda: None
        marks, before = self._marks, self._marks.of_places()

        def check() -> None:
            if marks.of_places() != before:
                raise ConfigError(
                    f"{_ADVICE}Parameters of this stage of the pipeline have changed between "
                    f"training_step and its backward, as in on_before_zero_grad, but a pipeline "
                    f"has computed the gradients by then; expected them to stay as they are."
                )

        return check

    def _edited(self) -> list[str]:
        """Return what has changed since the last time, while a batch is watched closely."""
        if not (self._in_batch and self._is_close and self._marks is not None):
            return []
        before, self._known = self._known, self._marks.by_name()
        edited = [one for one in before | self._known if before.get(one) != self._known.get(one)]
        self._times.update(edited)
        return edited


def _listed(names: list[str]) -> str:
    shown = list(dict.fromkeys(name.rstrip() for name in names))
    return ", ".join(shown[:3]) + " ..." * (len(shown) > 3)
