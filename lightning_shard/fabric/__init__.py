"""The engine under Lightning Fabric: `Fabric(strategy="zero3")`, and these classes for its options.

    fabric = Fabric(strategy=lightning_shard.fabric.ZeRO3Strategy(bucket_mb=50), devices=8)

A second thin adapter, beside `lightning_shard.strategies` for a Trainer. It runs no loop: between
two calls of Fabric's the user's code does, and what it sees of a module looks full.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_shard.fabric.checkpoints import trainer_checkpoint
    from lightning_shard.fabric.strategy import (
        DDPStrategy,
        FabricStrategy,
        ZeRO1Strategy,
        ZeRO2Strategy,
        ZeRO3Strategy,
    )
else:
    _HOMES = {
        **dict.fromkeys(
            ("DDPStrategy", "FabricStrategy", "ZeRO1Strategy", "ZeRO2Strategy", "ZeRO3Strategy"),
            "strategy",
        ),
        "trainer_checkpoint": "checkpoints",
    }

    def __getattr__(name: str) -> Any:
        """Import a name of the room on first use; registering names imports nothing of it."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "DDPStrategy",
    "FabricStrategy",
    "ZeRO1Strategy",
    "ZeRO2Strategy",
    "ZeRO3Strategy",
    "trainer_checkpoint",
]
