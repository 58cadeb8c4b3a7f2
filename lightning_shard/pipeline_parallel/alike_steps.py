"""Do all stages compute the same of a batch before the blocks? Each does so by itself.

    rank 0    batch ──> x[0::2] ──> block 0        rank 1    batch ──> x[1::2] ──> targets

A step that takes samples by what differs between processes gives one stage the inputs of some
samples and another the targets of others, which no shape tells. So while the first microbatch goes
through all stages, they note what torch functions before the first block are given, and compare it.
What comes of parameters, buffers and uninitialised memory is left out, and so is what only one
stage has called, since others may have kept its result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.torch_private import innermost_function_mode
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import digest

Calls = dict[str, None]
_PLAIN = (bool, int, float, str, slice)


class NotedCalls(TorchFunctionMode):
    """Notes what calls of torch functions inside are given, until `stop`."""

    def __init__(self, held: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__()
        self.calls: Calls = {}
        self._held = held
        self._left_out: dict[int, Tensor] = {}  # alive, so that numbers stay theirs
        self._inside, self._is_over = ExitStack(), False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is called inside."""
        with having(asker, Asker.ENGINE):
            self._left_out = {id(one): one for one in self._held()}
        with self._inside:
            self._inside.enter_context(self)
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Note nothing inside."""
        return setting(self, _is_over=True)

    def stop(self) -> None:
        """Note no more, and be no mode for compiled blocks, unless user code has set another."""
        self._is_over, self._left_out = True, {}
        if innermost_function_mode() is self:
            self._inside.close()

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._is_over:
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        name = resolve_name(func) or getattr(func, "__name__", "")
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        signs = [one for one in tensors if self._is_known(one) and one.numel() > 1]
        if signs and not name.endswith("__get__"):
            self.calls[f"{name}({', '.join(map(self._content, leaves))})"] = None
        result = func(*args, **(kwargs or {}))
        if "empty" in name or not all(map(self._is_known, tensors)):
            made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
            self._left_out |= {id(one): one for one in made}
        return result

    def _is_known(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        return is_plain and id(tensor) not in self._left_out

    def _content(self, leaf: Any) -> str:
        if isinstance(leaf, _PLAIN):
            return repr(leaf)
        if isinstance(leaf, Tensor) and self._is_known(leaf):
            with suppress(RuntimeError):  # values that cannot be read, as in torch.func.vmap
                has_memory = leaf.untyped_storage().nbytes() > 0  # as the engine's may not
                return _values(leaf) if has_memory else "..."
        return "..."


def _values(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return f"{tuple(tensor.shape)} #{digest(tensor):08x}"
    flat = tensor.detach().double().reshape(-1)  # kernels may round differently on other ranks
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    return f"{tuple(tensor.shape)} ~{float(flat.abs().dot(weights)):.3g}"


def check_alike(every: Sequence[Calls], kind: str) -> None:
    """Compare what the ranks of a pipeline have been given before the first block.

    Raises:
        ConfigError: Two ranks differ; raised on every rank.
    """
    for rank, calls in enumerate(every):
        got = [one for one in calls if one not in every[0]]
        expected = [one for one in every[0] if one not in calls]
        if got and expected:
            raise ConfigError(
                f"Rank {rank} of the pipeline: before the blocks the {kind} step calls {got[0]}, "
                f"but on rank 0, another stage, {expected[0]}. Every stage runs the "
                f"step by itself and must compute the same of a batch, or inputs of some samples "
                f"meet targets of others. Take samples by self.global_rank and "
                f"self.trainer.world_size, which count ranks of other samples, and nothing by what "
                f"differs between processes, such as LOCAL_RANK or a generator of their own."
            )
