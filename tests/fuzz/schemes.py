"""The strategies under which programs run, as source, and what their pages do not promise."""

from collections.abc import Iterable
from dataclasses import dataclass

from tests.fuzz.features import tags_of


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A strategy on so many ranks.

    Attributes:
        source: Makes the strategy.
        leaves_out: Tags of programs of which its page does not promise what one device does.
        tolerance: How far values may be apart, of what they are at most; None for the program's.
        backend: Of ranks that are processes; None for ranks in process.
        share: How often it is drawn beside others.
        wants: Tags of programs that it is for: it refuses most others.
        faults: What happens to ranks, as source; then what ranks note is not compared, of which
            some are lost, and some do steps again.
    """

    name: str
    source: str
    num_ranks: int
    leaves_out: frozenset[str] = frozenset()
    tolerance: float | None = None
    backend: str | None = None
    share: float = 1.0
    wants: frozenset[str] = frozenset()
    faults: str = ""

    def share_for(self, features: Iterable[str]) -> float:
        """Return how often it is drawn for a program, which it may have nothing to do with."""
        return self.share if self.wants <= tags_of(features) else 0.1 * self.share

    def promises(self, features: Iterable[str]) -> bool:
        """Return whether a program of these features is to train as on one device."""
        return not self.leaves_out & tags_of(features)


SCHEMES: dict[str, Scheme] = {}


def _add(
    name: str,
    strategy: str,
    options: str = "",
    *,
    ranks: Iterable[int] = (2, 4),
    leaves_out: Iterable[str] = (),
    tolerance: float | None = None,
    backend: str | None = None,
    share: float = 1.0,
    wants: Iterable[str] = (),
    faults: str = "",
) -> None:
    for num_ranks in ranks:
        full = f"{name} x{num_ranks}"
        given = f'backend="{backend or "in_process"}"' + (f", {options}" if options else "")
        SCHEMES[full] = Scheme(
            name=full,
            source=f"{strategy}({given})",
            num_ranks=num_ranks,
            leaves_out=frozenset((*leaves_out, *(OWN_SHARES if backend else ()))),
            tolerance=tolerance,
            backend=backend,
            share=share,
            wants=frozenset(wants),
            faults=faults,
        )


# What `trainer.predict` returns on a rank that is a process is that rank's share.
OWN_SHARES = ("predicts",)
# Of a batch norm each microbatch has its own statistics; what is lent is found in the first batch.
PIPELINE = ("of whole batch", "used late")
# Elements that hooks read are refused once they do: the ranks do not come there together.
SHARDS_OF_STAGES = ("reads weights", "by index", "averages", "copies")
# Ranks average what each has done alone: equal where that is linear in the gradient.
LOCAL = (
    "nonlinear",
    "of whole batch",
    "edits weights",
    "edits gradients",
    "reads gradients",
    "averaging callback",
    "copies",
    "averages",
    "reads weights",
    "manual",
    "freezes",
    "skips steps",
)
# Fewer ranks make more batches of a step: what hooks do at each batch's end is done more often. A
# validation repeats samples.
LOSSES = (
    "accumulates",
    "averages",
    "averaging callback",
    "by attributes",
    "copies",
    "counting buffer",
    "decays by batch",
    "edits gradients",
    "edits weights",
    "iterates",
    "logs",
    "of whole batch",
    "rate changed in a hook",
    "resumed",
    "validates",
)
ASYNC = ("averaging callback", "manual", "copies", "freezes")

_add("shard_ddp", "DDPStrategy", share=2)
_add("shard_ddp small buckets", "DDPStrategy", "bucket_mb=0.0005")
_add("zero1", "ZeRO1Strategy", share=2)
_add("zero2", "ZeRO2Strategy", share=2)
_add("zero3", "ZeRO3Strategy", share=3)
_add("zero3 small units", "ZeRO3Strategy", "bucket_mb=0.0005, prefetch=0")
_add("zero3 in nodes", "ZeRO3Strategy", "bucket_mb=0.0005, reshard_after_forward=2", ranks=[4])
_add("zero2 checkpointed", "ZeRO2Strategy", 'activation_checkpointing="full"', ranks=[2])
_add("zero3 checkpointed", "ZeRO3Strategy", 'activation_checkpointing="full"', ranks=[2])
_add("zero3 activations offloaded", "ZeRO3Strategy", "activation_offload=True", ranks=[2])
_add("zero2 offload", "ZeRO2Strategy", 'offload="optimizer"', ranks=[2])
_add("zero3 offload", "ZeRO3Strategy", 'offload="parameters"', ranks=[2])
_add(
    "zero3 sharded files",
    "ZeRO3Strategy",
    'checkpoint_format="sharded"',
    ranks=[2],
    leaves_out=["own file of weights after the fit"],
)
_add("tensor", "TensorParallelStrategy", share=2)
_add(
    "tensor x data, stage 1",
    "TensorParallelStrategy",
    "tensor_parallel_size=2, zero_stage=1",
    ranks=[4],
)
_add(
    "tensor x data, stage 2",
    "TensorParallelStrategy",
    "tensor_parallel_size=2, zero_stage=2",
    ranks=[4],
)
_add(
    "tensor x data, stage 3",
    "TensorParallelStrategy",
    "tensor_parallel_size=2, zero_stage=3",
    ranks=[4],
)
_add("tensor in sequence parts", "TensorParallelStrategy", "sequence_parallel=True", ranks=[2])
_add("pipeline", "PipelineParallelStrategy", leaves_out=PIPELINE, share=2)
_add(
    "pipeline gpipe",
    "PipelineParallelStrategy",
    'schedule="gpipe", num_microbatches=4',
    ranks=[2],
    leaves_out=PIPELINE,
)
_add(
    "pipeline interleaved",
    "PipelineParallelStrategy",
    'schedule="interleaved_1f1b", num_microbatches=4',
    ranks=[2],
    leaves_out=PIPELINE,
)
_add(
    "pipeline looped",
    "PipelineParallelStrategy",
    'schedule="looped_bfs", num_microbatches=4',
    ranks=[2],
    leaves_out=PIPELINE,
)
_add(
    "pipeline zbv",
    "PipelineParallelStrategy",
    'schedule="zbv", num_microbatches=4',
    ranks=[2],
    leaves_out=PIPELINE,
)
_add(
    "pipeline zero bubble",
    "PipelineParallelStrategy",
    'schedule="interleaved_zero_bubble", num_microbatches=4',
    ranks=[2],
    leaves_out=PIPELINE,
)
_add(
    "pipeline one microbatch",
    "PipelineParallelStrategy",
    "num_microbatches=1",
    ranks=[2],
    leaves_out=["used late"],
)
_add(
    "pipeline x data, stage 1",
    "HybridParallelStrategy",
    "pipeline_parallel_size=2, num_microbatches=2",
    ranks=[4],
    leaves_out=PIPELINE,
)
_add(
    "pipeline x data, stage 3",
    "HybridParallelStrategy",
    "pipeline_parallel_size=2, num_microbatches=2, zero_stage=3",
    ranks=[4],
    leaves_out=[*PIPELINE, *SHARDS_OF_STAGES],
)
_add(
    "pipeline x tensor",
    "HybridParallelStrategy",
    "pipeline_parallel_size=2, tensor_parallel_size=2, num_microbatches=2",
    ranks=[4],
    leaves_out=PIPELINE,
)
_add(
    "hybrid sharding",
    "HybridParallelStrategy",
    "data_parallel_size=(2, 2), zero_stage=3",
    ranks=[4],
)
_add("context", "ContextParallelStrategy", share=3, wants=["sequence"])
_add(
    "context x data, stage 2",
    "ContextParallelStrategy",
    "context_parallel_size=2, zero_stage=2",
    ranks=[4],
    share=2,
    wants=["sequence"],
)
_add("context, stage 3", "ContextParallelStrategy", "zero_stage=3", ranks=[2], wants=["sequence"])
_add(
    "experts",
    "HybridParallelStrategy",
    "expert_parallel_size=2",
    share=6,
    wants=["experts"],
    leaves_out=["prediction of an uneven number of samples"],
)
_add("local", "LocalSGDStrategy", "sync_every=1", ranks=[2], leaves_out=LOCAL)
_add("async", "AsyncSGDStrategy", "staleness_bound=0", ranks=[2], leaves_out=ASYNC)
_add("elastic", "ElasticStrategy", ranks=[2, 4])
_add("elastic zero3", "ElasticStrategy", 'scheme="zero3"', ranks=[2])
_add("elastic shard_ddp", "ElasticStrategy", 'scheme="shard_ddp"', ranks=[2])
for _name, _options in (
    ("elastic, a rank is lost", ""),
    ("elastic zero3, a rank is lost", 'scheme="zero3"'),
):
    _add(
        _name,
        "ElasticStrategy",
        _options,
        ranks=[4],
        leaves_out=LOSSES,
        faults='[Fault(1, 1, "drop", at_step=2)]',
    )
# All of the values travel, in bfloat16; what is lost comes with the next ones.
_add(
    "compressed",
    "ZeRO2Strategy",
    "compression=TopK(ratio=1.0)",
    ranks=[2],
    tolerance=5e-3,
    leaves_out=["nonlinear"],
)
_add("zero2 over Gloo", "ZeRO2Strategy", ranks=[2], backend="gloo", share=0.1)
_add("zero3 over shared memory", "ZeRO3Strategy", ranks=[2], backend="shm", share=0.1)
_add("zero3 over Gloo", "ZeRO3Strategy", ranks=[2], backend="gloo", share=0.1)
_add(
    "pipeline over Gloo",
    "PipelineParallelStrategy",
    ranks=[2],
    backend="gloo",
    share=0.1,
    leaves_out=PIPELINE,
)
