"""The metaclass of the strategies: it checks option names, and knows a class's counterpart.

A misspelt constructor option is one clear error, with the name that was probably meant. Of a
strategy that a Trainer of the other root of Lightning has taken (see `counterparts`), `isinstance`
still says what it was made as.
"""

import difflib
from abc import ABCMeta
from typing import Any

from lightning_shard.errors import ConfigError
from lightning_shard.on_pytorch_lightning.mirror import original
from lightning_shard.strategies.flat_options import explained, option_names, without_self


class OptionNames(ABCMeta):
    """Checks keyword arguments against the constructor's signature before calling it.

    An instance keeps what it was made with, as `given_options`. The signature of a class is its
    constructor's, and its docstring says what the options mean.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        """Make a strategy's class."""
        constructor = namespace.get("__init__")
        if constructor is not None:
            doc = explained(namespace.get("__doc__"), constructor)
            namespace = {**namespace, "__doc__": doc, "__signature__": without_self(constructor)}
        return super().__new__(cls, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct, or raise ConfigError for an option that the class does not have."""
        known = option_names(cls)
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{cls.__name__} has no option {name!r}; it has {', '.join(known)}.{hint}"
                )
        made = super().__call__(*args, **kwargs)
        made.given_options = args, kwargs
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or any(
            (original(kind.__module__), kind.__qualname__)
            == (original(cls.__module__), cls.__qualname__)
            for kind in type(instance).__mro__
        )
