"""Do all stages compute the same of a batch before the blocks? Each does so by itself.

    rank 0    batch ──> x[0::2] ──> block 0        rank 1    batch ──> x[1::2] ──> targets

A step that takes samples by something that differs between processes (LOCAL_RANK, a generator of
its own) gives one stage the inputs of some samples and another the targets of others, which no
shape tells. So the stages note what each call of a torch function before the first block is given,
and compare it before the first batch trains. What comes of parameters and buffers is left out, as
not every stage has them, and so is memory that nothing is in yet. What only one stage has called is
no sign: others may have kept its result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.containers import digest

Calls = dict[str, None]
_PLAIN = (bool, int, float, str, slice)


class NotedCalls(TorchFunctionMode):
    """Notes what calls of torch functions inside are given, until `stop`.

    Args:
        held: Parameters and buffers of the model, as the stage has them.

    Attributes:
        calls: The calls, in order.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: Calls = {}
        self._left_out = {id(one): one for one in held}  # alive, so that numbers stay theirs
        self._is_over = False

    def stop(self) -> None:
        """Note no more."""
        self._is_over = True

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._is_over:
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        name = resolve_name(func) or getattr(func, "__name__", "")
        given = [] if name.endswith("__get__") else [self._content(one) for one in leaves]
        if any(given):
            self.calls[f"{name}({', '.join(one or '...' for one in given)})"] = None
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        if "empty" in name or not all(map(self._is_known, tensors)):
            made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
            self._left_out |= {id(one): one for one in made}
        return result

    def _is_known(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and id(tensor) not in self._left_out

    def _content(self, leaf: Any) -> str:
        if isinstance(leaf, _PLAIN):
            return repr(leaf)
        if not isinstance(leaf, Tensor) or not self._is_known(leaf) or leaf.layout != torch.strided:
            return ""
        if not leaf.is_floating_point():
            return f"{tuple(leaf.shape)} #{digest(leaf):08x}"
        flat = leaf.detach().double().reshape(-1)  # kernels may round differently on other ranks
        weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
        return f"{tuple(leaf.shape)} ~{float(flat.abs().dot(weights)):.3g}"


def check_alike(every: Sequence[Calls], kind: str) -> None:
    """Compare what the ranks of a pipeline have been given before the first block.

    Args:
        every: Calls of each rank of the pipeline.
        kind: Name of the kind of step.

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
