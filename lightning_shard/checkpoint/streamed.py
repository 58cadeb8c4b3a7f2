"""A model and its optimizers in a checkpoint whose tensors come while its file is written.

    trainer.save_checkpoint
      state_dict, optimizer_state     tensors without elements, see `streamed_file`
      callbacks, the data module      may look at shapes; to read an element is an error
      the file                        rank 0 writes its own shards from where they lie, and those
                                      of other ranks as they arrive

So rank 0 holds a few megabytes above its share, and nothing is brought together before it is
written.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.frozen import frozen_entries
from lightning_shard.checkpoint.full import detached
from lightning_shard.checkpoint.full_parameters import full_parameters
from lightning_shard.checkpoint.optimizer_state import FullOptimizerState
from lightning_shard.checkpoint.streamed_file import Arriving, StreamedFile
from lightning_shard.data_parallel.engine import DataParallelEngine


class StreamedState:
    """What one save writes of a model and its optimizers; each rank must make one.

    Args:
        engine: The engine that holds the model.
        file: What is written.
        with_frozen: Whether frozen parameters are saved. Those that are not stay where they are:
            the state has their shapes only.
        number: Number of the model, where a file has several.
    """

    def __init__(
        self,
        engine: DataParallelEngine,
        file: StreamedFile,
        *,
        with_frozen: bool = True,
        number: int = 0,
    ) -> None:
        self._engine, self._file, self._with_frozen = engine, file, with_frozen
        self._number = number
        self._module: nn.Module | None = None
        self._stay: Collection[nn.Parameter] = ()
        self._optimizers: list[FullOptimizerState] = []
        file.add_source(self._bring_together())

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the full module's `state_dict`, its parameters without elements; see `full`."""
        self._module = module
        self._engine.adopt_assigned()  # what user code has replaced is the model's again
        places = {param: place for place, param in enumerate(self._engine.model.parameters())}
        dtypes = _full_dtypes(self._engine)
        state = module.state_dict(keep_vars=True)
        values = dict(state)
        for name, value in values.items():  # in place: torch's own mapping knows module versions
            if isinstance(value, nn.Parameter) and value in places:
                state[name] = self._file.await_tensor(
                    ("parameter", self._number, places[value]),
                    self._engine.full_shape(value),
                    dtypes.get(value, value.dtype),
                )
            else:
                state[name] = detached(value, self._engine)
        if not self._with_frozen:
            self._stay = frozen_entries(module, values)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full `state_dict` on rank 0, entries of shards without elements.

        Each rank must call.
        """
        full, number = FullOptimizerState(optimizer, self._engine), len(self._optimizers)
        self._optimizers.append(full)
        return full.with_tensors(
            {
                place: self._file.await_tensor(
                    ("state", self._number, number, *place), shape, dtype
                )
                for place, (shape, dtype) in full.shapes.items()
            }
        )

    def _bring_together(self) -> Arriving:
        """Bring every tensor together in turn; each rank must run through it."""
        if self._module is not None:
            places = {param: place for place, param in enumerate(self._engine.model.parameters())}
            for param, full in full_parameters(self._engine, without=self._stay):
                yield ("parameter", self._number, places[param]), full
        for number, optimizer in enumerate(self._optimizers):
            for place, full in optimizer.tensors():
                yield ("state", self._number, number, *place), full


def _full_dtypes(engine: DataParallelEngine) -> dict[nn.Parameter, torch.dtype]:
    """Return the format in which the engine gives each full parameter that is here."""
    return {
        param: flat.master_dtype
        for flat in engine.flats
        for param in flat.params
        if engine.split.is_here(param)
    }
