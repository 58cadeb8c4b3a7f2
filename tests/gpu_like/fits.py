"""Fits of one model under every strategy and precision, and the host's waits within their steps."""

import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import lightning_shard
from lightning_shard.data_parallel.compression.built_in import OneBit
from lightning_shard.data_parallel.offload import activations
from tests.gpu_like.autocast import register_autocast
from tests.gpu_like.device import NAME, register
from tests.gpu_like.mail import NobodyAnswersError
from tests.gpu_like.peers import Told, recording
from tests.gpu_like.ranks import GpuLikeAccelerator, OneOfSeveral, use_lonely_groups
from tests.gpu_like.watch import Watch
from tests.strategies.models import CONTEXT, ExampleGPT
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS
from tests.trainers import SILENT

BATCH_SIZE = 8
NUM_BATCHES = 8
# The first batches learn the order of things, the last one ends the fit; and ranks that share
# layers compare batches and results 0, 1, 2, 4, 8 ..., which costs a wait each time.
COUNTED = (5, 6)  # of two that accumulate or come between averages, the last and the first
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 2}
_PLAN: dict[str, Any] = {"plan": PLANS["gpt"]}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        ranks: Ranks that are tried, those that do different things.
        refuses: Precision that the strategy refuses, with its reason, or "".
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    accumulates: int = 1
    ranks: tuple[int, ...] = (0,)
    refuses: str = ""
    has_unused: bool = False

    @property
    def is_recorded(self) -> bool:
        """Whether ranks tell each other what one of them cannot know."""
        return "pipeline_parallel_size" in self.options


# Not here: elastic, whose processes meet at a server and copy snapshots to each other; its engine
# is that of the stages. To async_sgd nobody sends anything: in no order could that be recorded.
CASES = {
    "shard_ddp": Case("DDPStrategy"),
    "zero1": Case("ZeRO1Strategy"),
    "zero2": Case("ZeRO2Strategy"),
    "zero3": Case("ZeRO3Strategy"),
    "zero3_prefetch": Case("ZeRO3Strategy", {"prefetch": 2}),
    "zero3_checkpointing": Case("ZeRO3Strategy", {"activation_checkpointing": "full"}),
    "zero3_host_activations": Case("ZeRO3Strategy", {"activation_offload": True}),
    "tensor_host_activations": Case(
        "TensorParallelStrategy",
        {**_PLAN, "activation_offload": True, "activation_checkpointing": "selective"},
    ),
    "zero2_accumulating": Case("ZeRO2Strategy", accumulates=2),
    "zero2_unused": Case("ZeRO2Strategy", has_unused=True),
    "zero2_offload": Case("ZeRO2Strategy", {"offload": "optimizer"}),
    "zero3_offload": Case("ZeRO3Strategy", {"offload": "parameters"}),
    "shard_ddp_fp16": Case("DDPStrategy", {"compression": "fp16"}),
    "shard_ddp_int8": Case("DDPStrategy", {"compression": "int8"}),
    "shard_ddp_topk": Case("DDPStrategy", {"compression": "topk"}),
    "shard_ddp_powersgd": Case("DDPStrategy", {"compression": "powersgd"}),
    "shard_ddp_onebit": Case("DDPStrategy", {"compression": OneBit(warmup_steps=3)}),
    "tensor_parallel": Case("TensorParallelStrategy", _PLAN),
    "context_parallel": Case("ContextParallelStrategy"),
    "pipeline_parallel": Case("PipelineParallelStrategy", _STAGES, ranks=(0, 1)),
    "hybrid_parallel": Case(
        "HybridParallelStrategy",
        {**_STAGES, **_PLAN, "tensor_parallel_size": 2, "zero_stage": 2},
        num_ranks=8,
        ranks=(0, 7),
    ),
    "async_sgd": Case("AsyncSGDStrategy", {"staleness_bound": 2 * NUM_BATCHES}, refuses="16-mixed"),
    "local_sgd": Case("LocalSGDStrategy", {"sync_every": 2}),
}


@dataclass
class Seen:
    """What was seen within the counted steps of a fit.

    Attributes:
        waits: For each place that had the host wait: what for, where, from where, how often.
        races: Uses of memory without an order in all of the fit: both, and how often.
    """

    waits: list[tuple[str, str, str, int]] = field(default_factory=list)
    num_operations: int = 0
    num_steps: int = 0
    error: str = ""
    races: list[tuple[str, str, int]] = field(default_factory=list)
    num_uses: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return asdict(self)


class Watched(ExampleGPT):
    """The example's GPT, which says where its steps begin."""

    has_ended = False

    def __init__(self, watch: Watch, seen: Seen, has_unused: bool) -> None:
        super().__init__(num_layers=2)
        self._watched = [watch, seen]
        if has_unused:
            self.unused = nn.Linear(8, 8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        watch, seen = self._watched
        watch.start_counting(batch_idx in COUNTED)
        seen.num_steps += batch_idx in COUNTED

    def on_train_end(self) -> None:
        self._watched[0].start_counting(False)
        self.has_ended = True

    def cpu(self) -> "Watched":
        """Stay on the device, where a fit's end would take away what has no elements."""
        return self


class Batches:
    """Batches that lie on the device already: to move them is the loader's business.

    They are tuples, whose values are fields: two of a list may as well be two samples.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(NUM_BATCHES):
            yield self._zeros(), self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(BATCH_SIZE, CONTEXT, dtype=torch.long, device=self._device)


def fit(name: str, precision: str, rank: int = 0) -> Seen:
    """Fit the model on the device in this process, which has been told of it by `prepare`."""
    case, seen, watch = CASES[name], Seen(), Watch()
    told = _recorded(case, precision)[rank] if case.is_recorded else defaultdict(deque)
    use_lonely_groups(watch, told)
    with watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device(NAME, 0):
            model = Watched(watch, seen, case.has_unused)
        trainer = trainer_of(
            case,
            "fake",
            accelerator=GpuLikeAccelerator(),
            **_plugins(precision, NAME, OneOfSeveral(rank, case.num_ranks)),
        )
        try:
            trainer.fit(model, Batches(NAME))
        except NobodyAnswersError:
            pass  # the last step has come
        except BaseException as error:
            if not model.has_ended:  # else of a fit's end, which takes everything to the host
                first = next(iter(watch.mixed), error)
                seen.error = f"{type(first).__name__}: {first}"
        finally:
            watch.start_counting(False)
            if dist.is_initialized():
                dist.destroy_process_group()
    seen.waits = [(*wait, count) for wait, count in watch.found.items()]
    seen.num_operations = watch.num_operations
    order = watch.tracker.order
    seen.races = [(*race, count) for race, count in order.races.items()]
    seen.num_uses = order.num_uses
    return seen


def trainer_of(case: Case, backend: str, **options: Any) -> pl.Trainer:
    """Return a Trainer that fits in a case's way; ranks of this process share one device."""
    make = getattr(lightning_shard, case.strategy)
    are_in_process = backend == "in_process"
    ends = {"num_ranks": case.num_ranks} if are_in_process else _ends(case)
    return pl.Trainer(
        strategy=make(backend=backend, announce=False, **ends, **case.options),
        devices=1 if are_in_process else case.num_ranks,
        max_epochs=1,
        accumulate_grad_batches=case.accumulates,
        gradient_clip_val=1.0,
        **SILENT,
        use_distributed_sampler=False,
        **options,
    )


def _ends(case: Case) -> dict[str, Any]:
    """Return the option that leaves shards at a fit's end: full ones go to the host's memory."""
    has_it = case.strategy.startswith("ZeRO")
    return {"full_parameters_after_fit": False} if has_it else {}


def _recorded(case: Case, precision: str) -> dict[int, Told]:
    """Fit on CPU ranks, and return what each was told by the others."""
    with recording() as told, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(case, "in_process", accelerator="cpu", **_plugins(precision, "cpu"))
        trainer.fit(ExampleGPT(num_layers=2), Batches("cpu"))
    return told


def _plugins(precision: str, device: str, *others: Any) -> dict[str, Any]:
    """Return a Trainer's options of formats, which are those that it would make for a GPU.

    Lightning asks CUDA alone, and trains in bfloat16 elsewhere, whose gradients travel otherwise.
    """
    if not precision.endswith("mixed"):
        return {"precision": precision, "plugins": list(others)}
    return {"plugins": [*others, MixedPrecision(cast(Any, precision), device=device)]}


def prepare() -> None:
    """Tell torch of the device, once in a process."""
    if register().type != "cuda":
        register_autocast()
    activations.PLAIN_CLASSES.add(FakeTensor)  # those of the device
    activations.HostActivations.in_flight_bytes = 10_000  # less than a block's
