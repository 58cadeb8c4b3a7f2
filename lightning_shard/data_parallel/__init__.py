"""One data-parallel engine with four stages: what is replicated and what each rank holds 1/N of."""

from lightning_shard.data_parallel.views import global_values  # noqa: F401  (registers them)
