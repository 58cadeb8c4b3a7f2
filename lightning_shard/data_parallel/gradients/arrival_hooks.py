"""Hooks on the parameters that require gradients, which tell of each gradient when it has come."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.data_parallel.torch_private import hooks_after_gradient
from lightning_shard.data_parallel.views.sharded_parameter import as_they_are
from lightning_shard.errors import ConfigError

_OURS = "tells_of_arrival"  # an engine's hook: in a dry run a parameter has one for each stage


class ArrivalHooks:
    """Watches parameters for gradients, from when they require one.

    Args:
        positions: Number of the buffer and index in it of each parameter's gradient.
        hook_of: Returns for both what is called after autograd has put a gradient on the parameter.
    """

    def __init__(
        self,
        positions: Mapping[nn.Parameter, tuple[int, int]],
        hook_of: Callable[[int, int], Callable[[Tensor], None]],
    ) -> None:
        self._positions, self._hook_of = positions, hook_of
        self._handles: list[RemovableHandle] = []
        self._unwatched = list(positions)

    @as_they_are
    def watch(self) -> None:
        """Watch parameters that have come to require gradients (unfrozen ones, too)."""
        if not [param for param in self._unwatched if param.requires_grad]:
            return
        for param in (param for param in self._unwatched if param.requires_grad):
            self._handles.append(self._hook(param, *self._positions[param]))
        self._unwatched = [param for param in self._unwatched if not param.requires_grad]

    def _hook(self, param: nn.Parameter, position: int, index: int) -> RemovableHandle:
        hook = self._hook_of(position, index)
        setattr(hook, _OURS, True)
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def refuse_others(self, param: nn.Parameter, rank: int) -> None:
        """Raise if hooks of user code wait for a gradient that autograd's own pass does not add.

        Raises:
            ConfigError: There is such a hook, which would not be called.
        """
        if others_wait_for(param):
            shape = tuple(param.shape)
            raise ConfigError(
                f"Rank {rank}: a parameter of shape {shape} has a hook of "
                f"register_post_accumulate_grad_hook, which a pipeline would not call: it adds up "
                f"the gradients of microbatches itself. Use .grad in on_after_backward, change "
                f"the gradient in a hook of param.register_hook, or use strategy='zero2'."
            )

    def remove(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()
        self._unwatched = list(self._positions)


def others_wait_for(param: nn.Parameter) -> bool:
    """Whether user code is called once a parameter's gradient has been added up."""
    return not all(hasattr(hook, _OURS) for hook in hooks_after_gradient(param))
