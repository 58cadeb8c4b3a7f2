"""The private names of Lightning that the strategies touch.

Checked with lightning 2.6; `tests/strategies/test_tensor_parallel_batches.py` fails when one
changes.
"""

from lightning.fabric.utilities.data import _auto_add_worker_init_fn as seed_workers

__all__ = ["seed_workers"]
