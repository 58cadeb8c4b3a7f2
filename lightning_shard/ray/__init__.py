"""Ray Train: its workers are ranks of any strategy, its reports and restarts have our checkpoints.

RayEnvironment      which rank a worker is, and where the ranks meet
prepare_trainer     checks a Trainer in a train function, and gives it this worker's device
RayReportCallback   reports metrics and checkpoints to Ray
latest_checkpoint   what a restarted worker group goes on from
dataset_batches     this worker's batches of a Ray dataset; the ranks of one model get the same

Ray is imported when something of it is needed: `pip install 'lightning-shard[ray]'`.
"""

from lightning_shard.environments import RayEnvironment
from lightning_shard.ray.training import (
    DatasetBatches,
    RayReportCallback,
    dataset_batches,
    latest_checkpoint,
    prepare_trainer,
)

__all__ = [
    "DatasetBatches",
    "RayEnvironment",
    "RayReportCallback",
    "dataset_batches",
    "latest_checkpoint",
    "prepare_trainer",
]
