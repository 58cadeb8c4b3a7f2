"""What other ranks than those that have saved a checkpoint take up of its section, in full."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_shard.checkpoint.by_rank import entries_of_ranks
from lightning_shard.checkpoint.files.open_folder import INDEX_FILE
from lightning_shard.data_parallel.compression.state import mean_of_ranks, with_means


def is_sharded_folder(path: str | Path) -> bool:
    """Whether there is a complete checkpoint of the sharded format at `path`."""
    return Path(path, INDEX_FILE).is_file()


def compression_in(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of compression, with means of what ranks have kept."""
    kept = [entry.get("compression", {}) for _, entry in entries_of_ranks(section)]
    state = with_means(section["compression"], kept)
    return {key: dict(one) if isinstance(one, Mapping) else one for key, one in state.items()}


def own_parameters_in(section: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mean of the parameters that ranks of local SGD have trained by themselves."""
    kept = [entry["local_sgd"]["parameters"] for _, entry in entries_of_ranks(section)]
    return dict(mean_of_ranks(kept))
