"""The tables of options on the pages of docs/, from the fields that declare the options.

    python -m tests.docs.option_tables            write them

A page chooses which options a table has, and in which order; default and meaning are the fields'.
"""

import re
from dataclasses import fields
from typing import Any

import lightning_shard
from tests.docs.pages import ROOT, quotes, text_of

PAGES: dict[str, Any] = {
    "docs/tensor_parallel.md": lightning_shard.TensorParallelStrategy,
    "docs/pipeline_parallel.md": lightning_shard.PipelineParallelStrategy,
    "docs/context_parallel.md": lightning_shard.ContextParallelStrategy,
    "docs/expert_parallel.md": lightning_shard.HybridParallelStrategy,
    "docs/hybrid_parallel.md": lightning_shard.HybridParallelStrategy,
    "docs/hybrid_sharding.md": lightning_shard.HybridParallelStrategy,
    "docs/plan.md": lightning_shard.AutoStrategy,
    "docs/local_sgd.md": lightning_shard.LocalSGDStrategy,
    "docs/async_sgd.md": lightning_shard.AsyncSGDStrategy,
    "docs/elastic.md": lightning_shard.ElasticStrategy,
    "docs/strategies.md": lightning_shard.ZeRO2Strategy,
}
OF_SOME = ("docs/expert_parallel.md", "docs/hybrid_sharding.md")
"""Pages of some options of a strategy that another page has."""
SEE = {
    "backend": "[backends](backends.md)",
    "debug": "[debugging](errors.md#ranks-call-different-things)",
    "checkpoint_format": "[checkpoints](checkpoints.md)",
    "save_on_sigterm": "[preemption](checkpoints.md#when-a-job-is-preempted)",
    "async_save": "[checkpoints](checkpoints.md)",
    "bucket_mb": "[buckets that suit the link](speed.md#buckets-that-suit-the-link)",
    "activation_checkpointing": "[activation checkpointing](activation_checkpointing.md)",
    "activation_offload": "[activation offload](activation_offload.md)",
    "full_parameters_after_fit": "[the end of a fit](zero3.md#the-end-of-a-fit)",
    "compression": "[compression](compression.md)",
    "offload": "[offload](offload.md)",
    "gather_dtype": "[layers in float8](low_precision.md#layers-in-float8)",
    "quantized_gathers": "[the wire](low_precision.md#the-wire)",
    "reshard_after_forward": "[inside a node](low_precision.md#inside-a-node)",
    "same_bits": "[the same bits](same_bits.md)",
    "plan": "[plans](tensor_parallel.md#options)",
    "schedule": "[schedules](pipeline_parallel.md#options)",
    "batch_lists": "[lists in batches](pipeline_parallel.md#lists-in-batches)",
    "context_parallel_size": "[context parallel](context_parallel.md)",
    "expert_parallel_size": "[expert parallel](expert_parallel.md)",
    "data_parallel_size": "[hybrid sharding](hybrid_sharding.md)",
    "tensor_plan": "[plans](tensor_parallel.md#options)",
    "outer_optimizer": "[DiLoCo](https://arxiv.org/abs/2311.08105)",
}
"""By option the page that says more."""
_CODE = re.compile(r"`[^`]*`|\{[^{}]*\}|\"\w+\"")


def with_tables(name: str) -> str:
    """Return the text of a page with the tables as the options are declared."""
    declared = {one.name: one for one in fields(PAGES[name].__init__.group)}
    lines, in_table = [], False
    for line in text_of(name).splitlines(keepends=True):
        in_table = line.startswith("|") and (in_table or line.startswith("| option |"))
        of_row = quotes(line)[:1] if in_table and line.startswith("| `") else []
        lines += [_row(declared[one.partition("=")[0]], name) for one in of_row] or [line]
    return "".join(lines)


def _row(option: Any, page: str) -> str:
    is_shown = option.default is None or isinstance(option.default, (bool, int, float, str, tuple))
    default = repr(option.default).replace("'", '"')
    name = f"{option.name}={default}" if is_shown else option.name
    return f"| `{name}` | {meaning(option, page)} |\n"


def meaning(option: Any, page: str) -> str:
    """Return what an option means, as a cell of a page's table, with the page that says more."""
    said = " ".join(option.metadata["doc"].split())
    more = SEE.get(option.name, "").replace(f"({page.removeprefix('docs/')}#", "(#")
    more = "" if f"({page.removeprefix('docs/')})" in more or "(#options)" in more else more
    in_code = _CODE.sub(lambda one: f"`{one[0].strip('`')}`", said)
    return f"{in_code}{f' See {more}.' if more else ''}"


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(with_tables(page), encoding="utf-8")
