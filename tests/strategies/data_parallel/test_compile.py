"""torch.compile of networks, blocks and methods under every strategy."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer import trainer as trainer_module
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard import (
    ConfigError,
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.processes import run_processes
from tests.strategies.compiled import (
    WAYS,
    CheckpointedNet,
    Compiled,
    CountGraphs,
    LoopedNet,
    NormedNet,
    UnrolledNet,
)
from tests.strategies.parity import (
    ATOL,
    SMALL_BUCKET_MB,
    UPSTREAM_WARNINGS,
    Curve,
    GlobalBatches,
    Run,
    ignore_upstream_warnings,
    quiet_trainer,
)

# torch 2.13 looks at the inputs of what it compiles
LOOKS_AT_INPUTS = r"The \.grad attribute of a Tensor that is not a leaf"
pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    pytest.mark.filterwarnings(f"ignore:{LOOKS_AT_INPUTS}"),
    pytest.mark.filterwarnings(r"ignore:`torch.jit.script_method` is deprecated"),  # inductor
]

NUM_STEPS = 3
FULL = ("net", "net_in_place", "self", "wrapped")  # a pipeline cannot cut these
IN_PROCESS: dict[str, tuple[type, int, dict[str, Any]]] = {
    "shard_ddp": (DDPStrategy, 2, {}),
    "zero2": (ZeRO2Strategy, 2, {}),
    "zero3": (ZeRO3Strategy, 2, {}),
    "zero3-4": (ZeRO3Strategy, 4, {}),
    "tensor": (TensorParallelStrategy, 2, {}),
    "tensor-stage3": (TensorParallelStrategy, 4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "pipeline": (PipelineParallelStrategy, 2, {}),
    "hybrid": (
        HybridParallelStrategy,
        4,
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "zero_stage": 3},
    ),
}


def slow(*values: Any) -> list[Any]:
    """Leave these to `make test-all`."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for one in values
    ]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def in_process(name: str) -> tuple[Any, int]:
    cls, num_ranks, options = IN_PROCESS[name]
    strategy = cls(backend="in_process", **options)
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return strategy, num_ranks


def built(way: str, backend: Any = "eager", net: type[LoopedNet] = LoopedNet) -> Any:
    torch.manual_seed(7)
    if way == "wrapped":
        return torch.compile(Compiled("not", net=net), backend=backend)
    return Compiled(way, backend, net)


def train(model: Any, **options: Any) -> Run:
    """Train as the other tests of parity do, but a few steps only: each compiles anew."""
    curve = Curve()
    trainer = quiet_trainer(callbacks=[curve], max_steps=NUM_STEPS, **options)
    trainer.fit(model, datamodule=GlobalBatches(model, NUM_STEPS))
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Run(losses=curve.losses, norms=curve.norms, weights=weights)


def assert_parity(run: Run, expected: Run) -> None:
    assert len(run.norms) == NUM_STEPS
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.norms, expected.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.weights, expected.weights, rtol=1e-5, atol=ATOL)


@cache
def not_compiled(net: type[LoopedNet] = LoopedNet) -> Run:
    return train(built("not", net=net))


def fit_compiled(
    strategy: str, way: str, backend: Any = "eager", net: type[LoopedNet] = LoopedNet
) -> Run:
    plugin, num_ranks = in_process(strategy)
    run = train(built(way, backend, net), strategy=plugin, devices=num_ranks)
    weights = {name.replace("_orig_mod.", ""): one for name, one in run.weights.items()}
    return replace(run, weights=weights)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "way",
    [
        "net",
        "blocks_in_place",
        *slow("net_in_place", "self", "blocks", "method", "ends", "wrapped"),
    ],
)
def test_dynamo_does_not_trace_the_collectives_of_stage_3s_hooks(way: str) -> None:
    """Dynamo traced the collectives of stage 3's hooks."""
    assert_parity(fit_compiled("zero3", way), not_compiled())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("shard_ddp", "self"),
        ("zero2", "method"),
        ("zero2", "wrapped"),
        *slow(("shard_ddp", "method"), ("shard_ddp", "wrapped"), ("zero2", "self")),
    ],
)
def test_compiled_code_of_another_rank_calls_its_own_module(strategy: str, way: str) -> None:
    """Compiled code of another rank called the module of rank 0."""
    assert_parity(fit_compiled(strategy, way), not_compiled())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("tensor-stage3", "blocks_in_place"),
        ("pipeline", "blocks_in_place"),
        ("pipeline", "method"),
        ("pipeline", "ends"),
        ("hybrid", "blocks_in_place"),
        *slow(
            ("zero3-4", "blocks_in_place"),
            ("pipeline", "blocks"),
            ("hybrid", "method"),
            *(
                ("tensor", way)
                for way in ("method", "wrapped", "net", "net_in_place", "self", "blocks", "ends")
            ),
            *(("tensor-stage3", way) for way in (*WAYS, "wrapped") if way != "blocks_in_place"),
            *(("hybrid", way) for way in ("blocks", "ends")),
        ),
    ],
)
def test_compiled_modules_under_the_splits_of_a_model(strategy: str, way: str) -> None:
    assert_parity(fit_compiled(strategy, way), not_compiled())


@pytest.mark.parametrize("way", FULL)
def test_a_pipeline_names_what_is_compiled_as_one(way: str) -> None:
    with pytest.raises(ConfigError, match=r"is compiled as a whole.*block\.compile\(\)"):
        fit_compiled("pipeline", way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way", "net"),
    [
        ("zero3", "blocks_in_place", CheckpointedNet),
        *slow(
            ("zero3", "net_in_place", LoopedNet),
            ("zero3", "net_in_place", CheckpointedNet),
            ("zero3", "self", UnrolledNet),
            ("zero3", "wrapped", NormedNet),
            ("hybrid", "blocks", CheckpointedNet),
        ),
    ],
)
def test_saved_views_of_compiled_backwards_are_gathered_again(
    strategy: str, way: str, net: type[LoopedNet]
) -> None:
    assert_parity(fit_compiled(strategy, way, "aot_eager", net), not_compiled(net))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("zero3", "blocks_in_place"),
        ("zero3", "net"),
        ("tensor-stage3", "net_in_place"),
        ("pipeline", "blocks"),
        ("hybrid", "blocks_in_place"),
    ],
)
def test_inductors_code_under_splits(strategy: str, way: str) -> None:
    assert_parity(fit_compiled(strategy, way, "inductor"), not_compiled())


class ConfiguredLate(Compiled):
    """Compiles in a hook what is compiled in the constructor otherwise."""

    late = "configure_model"

    def __init__(self, way: str, **options: Any) -> None:
        self.way = way
        super().__init__("not", **options)
        setattr(self, self.late, self.compile_once)

    def compile_once(self) -> None:
        way, self.way = self.way, "not"
        getattr(self, f"compile_{way}")()


class StartedLate(ConfiguredLate):
    late = "on_fit_start"


def fit_as_one_graph(strategy: str, way: str, kind: type[Compiled] = Compiled) -> Run:
    torch.manual_seed(7)
    plugin, num_ranks = in_process(strategy)
    run = train(kind(way, fullgraph=True), strategy=plugin, devices=num_ranks)
    weights = {name.replace("_orig_mod.", ""): one for name, one in run.weights.items()}
    return replace(run, weights=weights)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("shard_ddp", "net"),
        ("zero2", "method"),
        ("zero3", "blocks"),
        ("pipeline", "blocks_in_place"),
        *slow(("zero2", "net_in_place"), ("zero3", "blocks_in_place"), ("pipeline", "blocks")),
    ],
)
def test_whole_graphs_train_where_nothing_ends_them(strategy: str, way: str) -> None:
    assert_parity(fit_as_one_graph(strategy, way), not_compiled())


@pytest.mark.parametrize(
    ("strategy", "way", "kind"),
    [
        ("zero3", "net", Compiled),
        ("zero3", "net_in_place", StartedLate),
        ("tensor", "method", Compiled),
        ("tensor", "blocks_in_place", Compiled),
        ("pipeline", "net_in_place", StartedLate),
        ("pipeline", "method", Compiled),
        *slow(
            ("zero3", "net", ConfiguredLate),
            ("zero3", "method", Compiled),
            ("tensor", "net", Compiled),
            ("tensor", "net", ConfiguredLate),
            ("tensor-stage3", "net_in_place", Compiled),
        ),
    ],
)
def test_one_graph_of_what_ranks_exchange_in_is_refused_by_name(
    strategy: str, way: str, kind: type[Compiled]
) -> None:
    """The error was torch's own, which named a hook of the package and no option."""
    with pytest.raises(ConfigError, match=r"Leave fullgraph=True out\. Or compile each block"):
        fit_as_one_graph(strategy, way, kind)


class CutByItself(Compiled):
    def loss_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().loss_of(batch)


def test_code_that_is_no_whole_graph_on_one_device_raises_the_same_on_ranks() -> None:
    with pytest.raises(Unsupported, match="graph_break"):
        fit_as_one_graph("zero3", "method", CutByItself)


class GraphsPerStep(L.Callback):
    """Notes how many graphs there are after each step, and runs the module outside of steps."""

    def __init__(self, backend: CountGraphs) -> None:
        self.backend = backend
        self.graphs: list[int] = []
        self.outputs: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.graphs.append(self.backend.graphs)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.outputs.append(pl_module(torch.ones(2, 4)).detach().clone())


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("way", ["net_in_place", "blocks_in_place"])
def test_no_step_but_the_first_compiles_and_code_outside_of_steps_gathers(way: str) -> None:
    backend = CountGraphs()
    callback, model = GraphsPerStep(backend), built(way, backend)
    strategy, num_ranks = in_process("zero3")
    quiet_trainer(strategy=strategy, devices=num_ranks, callbacks=[callback], max_steps=5).fit(
        model, torch.utils.data.DataLoader(model.data(120), batch_size=6)
    )
    assert callback.graphs[0] > 0
    assert callback.graphs == [callback.graphs[0]] * len(callback.graphs)
    torch.testing.assert_close(callback.outputs[0], model(torch.ones(2, 4)).detach())


@contextmanager
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def breaks_of_fsdp2(net: type[LoopedNet], way: str) -> tuple[int, int]:
    """Return how often a step runs a graph, and the breaks that dynamo counts."""
    backend = CountGraphs()
    model = built(way, backend, net)
    with one_rank() as mesh:
        for block in model.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model.net, mesh=mesh)
        model.loss(model.data(12).tensors).backward()
    return backend.calls, sum(counters["graph_break"].values())


def breaks_of_stage_3(net: type[LoopedNet], way: str) -> tuple[int, int]:
    """Return the same."""
    backend = CountGraphs()
    model = built(way, backend, net)
    strategy = ZeRO3Strategy(backend="in_process", num_ranks=1)
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    trainer = quiet_trainer(strategy=strategy, max_steps=1, accumulate_grad_batches=1)
    trainer.fit(model, torch.utils.data.DataLoader(model.data(12), batch_size=12))
    return backend.calls, sum(counters["graph_break"].values())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("net", [UnrolledNet, NormedNet])
@pytest.mark.parametrize(("way", "num_breaks"), [("net_in_place", 4), ("blocks_in_place", 0)])
def test_stage_3_breaks_a_graph_where_fsdp2_does(
    net: type[LoopedNet], way: str, num_breaks: int
) -> None:
    """One break before each block; a block's forward is one graph."""
    expected = breaks_of_fsdp2(net, way)
    torch._dynamo.reset()
    counters.clear()
    assert breaks_of_stage_3(net, way) == expected
    assert expected[1] == num_breaks


def train_compiled_on_gloo() -> list[Run]:
    ignore_upstream_warnings()
    warnings.filterwarnings("ignore", LOOKS_AT_INPUTS)
    runs = []
    for way in ("net_in_place", "blocks_in_place"):
        strategy = ZeRO3Strategy(backend="gloo", bucket_mb=SMALL_BUCKET_MB)
        runs.append(train(built(way, "aot_eager"), strategy=strategy, devices=2))
    return runs


@pytest.mark.slow
def test_compiled_stage_3_on_processes() -> None:
    for runs in run_processes(train_compiled_on_gloo, 2):
        for run in runs:
            assert_parity(run, not_compiled())


def test_lightning_checks_compiled_modules_where_it_is_exchanged() -> None:
    assert "strategy" in trainer_module._verify_strategy_supports_compile.__annotations__
    model = trainer_module._maybe_unwrap_optimized(built("wrapped"))
    with pytest.raises(RuntimeError, match="incompatible with the current strategy"):
        trainer_module._verify_strategy_supports_compile(model, object())
