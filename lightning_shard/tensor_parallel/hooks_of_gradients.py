"""Hooks of `param.register_hook` on split parameters are given gradients that look full.

    part's gradient ──looks full──► the user's hook ──this rank's part──► accumulated

Without it a hook that takes a norm would take that of this rank's part, on each rank another.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.arrival_hooks import others_wait_for
from lightning_shard.data_parallel.torch_private import gradient_hooks
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import Part
from lightning_shard.tensor_parallel.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class HookOnPart:
    """Calls a hook with a gradient that looks full, and takes this rank's part of its result.

    Attributes:
        hook: The hook of user code.
        sharding: How the hook's parameter is cut.
        group: Group of the ranks that have the parts.
    """

    hook: Any
    sharding: Sharding
    group: Collectives

    def __call__(self, grad: Tensor) -> Tensor | None:
        """Return the part of what the hook makes of the gradient, or None as the hook does."""
        dim, num_blocks = self.sharding.dim, len(self.sharding.blocks)
        part = Part(local=grad, dim=dim, group=self.group, num_blocks=num_blocks)
        changed = self.hook(part.wide_gradient(grad))
        return None if changed is None else part.own_gradient(changed)


def show_full(shardings: dict[nn.Parameter, Sharding], group: Collectives) -> None:
    """Let the hooks that split parameters have by now see gradients that look full.

    Raises:
        ConfigError: A hook waits for `.grad`, which is this rank's part then.
    """
    for param, sharding in shardings.items():
        if others_wait_for(param):
            raise ConfigError(
                f"Rank {group.rank}: a split parameter, of shape {tuple(param.shape)} here, has a "
                f"hook of register_post_accumulate_grad_hook, whose .grad would be this rank's "
                f"part. Use .grad in on_after_backward, change the gradient in a hook of "
                f"param.register_hook, or use strategy='zero2'."
            )
        hooks = gradient_hooks(param)
        for key, hook in hooks.items():
            if not isinstance(hook, HookOnPart):
                hooks[key] = HookOnPart(hook=hook, sharding=sharding, group=group)


def show_as_they_are(params: Iterable[nn.Parameter]) -> None:
    """Let the hooks of parameters, which are full again, see gradients as autograd has them."""
    for param in params:
        hooks = gradient_hooks(param)
        for key, hook in hooks.items():
            if isinstance(hook, HookOnPart):
                hooks[key] = hook.hook


def put_first(param: nn.Parameter, handle: RemovableHandle) -> None:
    """Call a hook before those that user code has put on the parameter."""
    hooks = cast("OrderedDict[int, Any]", gradient_hooks(param))
    hooks.move_to_end(handle.id, last=False)
