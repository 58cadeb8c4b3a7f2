"""An optimizer's step that raises ends as any other does, so that who catches the error can go on.

torch calls the hooks after a step only where the step returns. So `optimizer.step` is wrapped, as
torch's own schedulers do it. An interrupt (Ctrl-C, say) may find other ranks anywhere, and the
failure of a rank leaves nobody to exchange with: after those nothing is sent until the model is
used again.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from lightning_shard.errors import ConfigError, ShardError


class FailingSteps:
    """Calls back where a step of an optimizer raises, until `detach`.

    Args:
        optimizer: The user's optimizer.
        end: Called before an error goes on to the caller of the step.
        end_later: Called in its place where other ranks may be anywhere.
    """

    def __init__(
        self, optimizer: Optimizer, end: Callable[[], None], end_later: Callable[[], None]
    ) -> None:
        self._optimizer, self._end, self._end_later = optimizer, end, end_later
        self._before = vars(optimizer).get("step")
        step = optimizer.step

        @wraps(step)
        def watched(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException as error:
                (self._end if _all_are_there(error) else self._end_later)()
                raise

        self._ours = MethodType(watched, optimizer)
        optimizer.step = self._ours  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the optimizer its own step back, unless somebody has wrapped ours since."""
        self._end = self._end_later = _nothing
        if vars(self._optimizer).get("step") is not self._ours:
            return
        if self._before is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._before  # type: ignore[method-assign]


def _all_are_there(error: BaseException) -> bool:
    """Whether the other ranks are where they would be without the error."""
    is_of_group = isinstance(error, ShardError) and not isinstance(error, ConfigError)
    return isinstance(error, Exception) and not is_of_group


def _nothing() -> None:
    pass
