from lightning_shard.elsewhere import Elsewhere, is_elsewhere  # noqa: D100, F401
