"""Buffers that a training step changes, which runs once for each microbatch.

    spectral_norm's vectors    each microbatch, and what tries a step before the first, starts from
                               those of before the batch, so that they are iterated once per batch
    the module's own, small    once per batch, as the last stage's steps say: `StepAttributes`
    of another stage, by hand  refused: the last stage's steps change what another stage has
    any other                  changed once per microbatch; the first batch tells which, by name

The vectors of a power iteration depend on the weights alone, so that every microbatch makes the
same of them. Statistics and queues depend on the samples, and go from one microbatch to the next.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel._torch import iterates_powers
from lightning_shard.pipeline_parallel.staged_model import MAX_FOLLOWED_NUMEL, StagedModel

_MOST_NAMED = 3  # layers in a warning


_Watched = dict[str, tuple[nn.Module, str, Tensor | None]]  # by path, with their values


class StepBuffers:
    """Follows the buffers of a pipeline's own stages through its batches.

    Args:
        model: The model, cut into stages.
        group: Group of the pipeline's ranks, each of which must call `batch` alike.
        last_stage: Number of the last stage, whose steps run to their end.
        has_last: Whether this rank has it.
    """

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
        """Run one batch inside.

        Raises:
            ConfigError: A step changes a buffer of another stage by hand; raised on every rank.
        """
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
        return {path: tensor.clone() for path, (_, _, tensor) in seen.items()}

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
        theirs = [path for path in others if not _is_same(now[path][2], others[path])]
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
