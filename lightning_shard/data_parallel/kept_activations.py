"""What a run keeps of activations for backward: checkpoints, and what is on the host."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_shard.backends.traffic import Traffic
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.offload.activations import HostActivations
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.data_parallel.recompute.checkpointed_blocks import checkpointed_blocks
from lightning_shard.data_parallel.torch_private import storage_key

Step = Callable[..., Any]


class KeptActivations:
    """The activations of one rank's fit, from `begin` to `end`.

    Attributes:
        traffic: Calls, elements and bytes that went "down" to host memory and "up", in this fit or
            the last.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._checkpoints = ExitStack()
        self._host: HostActivations | None = None
        self._engine: DataParallelEngine | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of the host memory that activations lie in, lent or not."""
        return 0 if self._host is None else self._host.pool.num_bytes

    def begin(self, model: nn.Module, options: EngineOptions) -> None:
        """Let blocks be checkpointed, before the model is split and an engine hooks it."""
        self.end()  # of the ranks before, where there were others
        choice, units = options.activation_checkpointing, options.units
        self._checkpoints.enter_context(checkpointed_blocks(model, choice, units))

    def attach(self, engine: DataParallelEngine) -> None:
        """Let the activations of an engine's model go to host memory, where its options say so."""
        if engine.options.activation_offload:
            self._engine, self._host = engine, HostActivations(engine.device)
            self.traffic = self._host.traffic

    def around(self, step: Step) -> Step:
        """Return a training step, or a microbatch's part of it, whose activations are kept so."""
        host = self._host
        if host is None:
            return step

        def kept(*args: Any, **kwargs: Any) -> Any:
            with host.saving(partial(self._held, (args, kwargs))):
                return step(*args, **kwargs)

        host.pool.note_batch()
        return kept

    @contextmanager
    def forward(self, *given: Any) -> Iterator[None]:
        """Run a forward inside whose activations are kept so; what it is given is there anyway."""
        if self._host is None:
            yield
            return
        self._host.pool.note_batch()
        with self._host.saving(partial(self._held, given)):
            yield

    def _held(self, given: Any) -> set[int]:
        """Return the storages that are on the device anyway."""
        engine = self._engine
        assert engine is not None
        flats = [tensor for flat in engine.flats for tensor in (flat.full, flat.shard)]
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        return {storage_key(one) for one in (*flats, *engine.model.buffers(), *tensors)}

    def end(self) -> None:
        """Let blocks be what they were, and host memory go."""
        self._checkpoints.close()
        self._host = self._engine = None
