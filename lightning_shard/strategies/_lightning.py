"""The private names of Lightning that the strategies touch.

Checked with lightning 2.6; `tests/strategies/test_tensor_parallel_batches.py` and
`tests/strategies/test_measured_stages.py` fail when one changes.
"""

from lightning.fabric.utilities.data import _auto_add_worker_init_fn as seed_workers
from lightning.pytorch.trainer.connectors.data_connector import (
    _request_dataloader as request_dataloader,
)

__all__ = ["request_dataloader", "seed_workers"]
