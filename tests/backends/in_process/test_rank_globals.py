"""What is global to a process is each rank's own, and the caller's afterwards."""

import io
import os
import random
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # whose globals are swapped, once it is imported
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard.backends.in_process import rank_globals
from lightning_shard.backends.in_process.world import current_rank
from lightning_shard.testing import run_ranks


def draw() -> list[float]:
    """Draw from every stream; an odd number of numpy normals, as it keeps a spare one."""
    return [torch.rand(()).item(), random.random(), *np.random.randn(3), np.random.rand()]


def test_each_rank_has_the_random_streams_of_a_process_of_its_own() -> None:
    def fn(rank: int) -> list[float]:
        drawn = draw()
        for _ in range(3):
            dist.barrier()
            drawn += draw()
        return drawn

    expected = []
    for rank in range(3):
        torch.manual_seed(7 + rank)
        random.seed(7 + rank)
        np.random.seed(7 + rank)
        expected.append([number for _ in range(4) for number in draw()])
    assert run_ranks(fn, 3, seed=7) == expected


def snapshot() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(part) for part in np.random.get_state()],
        torch.get_default_dtype(),
        getattr(rank_zero_only, "rank", None),
        dict(os.environ),
        dist.distributed_c10d._world,
        dist.is_initialized(),
        dist.distributed_c10d._new_process_group_helper,
        dist.distributed_c10d.rendezvous,
        sys.excepthook,
        warnings.filters,
        torch.is_grad_enabled(),
        torch.autograd.is_multithreading_enabled()
        if hasattr(torch.autograd, "is_multithreading_enabled")
        else None,
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_globals_are_as_before(fails: bool) -> None:
    np.random.seed(3)
    np.random.randn(1)
    before = snapshot()

    def fn(rank: int) -> None:
        draw()
        torch.set_default_dtype(torch.float64)
        os.environ["MASTER_PORT"] = "12345"
        os.environ.pop("LOCAL_RANK")
        warnings.filters = []
        dist.barrier()
        if fails and rank == 1:
            raise ValueError

    if fails:
        with pytest.raises(ValueError):  # noqa: PT011 - it has no text
            run_ranks(fn, 2)
    else:
        run_ranks(fn, 2)
    assert snapshot() == before


def test_a_rank_keeps_its_globals_over_a_switch() -> None:
    def fn(rank: int) -> None:
        torch.set_default_dtype([torch.float32, torch.float64][rank])
        os.environ["MASTER_PORT"] = str(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning if rank else UserWarning)
            mine = list(warnings.filters)
            dist.barrier()
            assert warnings.filters == mine
        assert torch.get_default_dtype() == [torch.float32, torch.float64][rank]
        assert os.environ["MASTER_PORT"] == str(rank)
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == "2"
        assert rank_zero_only.rank == rank == current_rank() == dist.get_rank()

    run_ranks(fn, 2)


def test_what_a_rank_imports_works_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's stance was None from the next switch on, if a rank was the first to import it."""
    monkeypatch.setitem(rank_globals._MODULE_GLOBALS, ("imported_late", "stance"), lambda _: [])

    def fn(rank: int) -> list[str]:
        dist.barrier()
        if rank == 1:
            module = ModuleType("imported_late")
            module.stance = []
            monkeypatch.setitem(sys.modules, "imported_late", module)
            module.stance.append("rank 1's")
        dist.barrier()
        return list(sys.modules["imported_late"].stance)

    assert run_ranks(fn, 3) == [[], ["rank 1's"], []]


def test_a_group_that_was_there_before_is_there_afterwards() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        outer = dist.group.WORLD
        run_ranks(lambda rank: dist.barrier(), 2)
        assert dist.group.WORLD is outer
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_redirected_output_stays_with_its_rank_over_a_collective() -> None:
    outer = sys.stdout, sys.stderr

    def fn(rank: int) -> str:
        with redirect_stdout(io.StringIO()) as text, redirect_stderr(text):
            dist.barrier()
            print(f"out {rank}")
            dist.barrier()
            print(f"err {rank}", file=sys.stderr)
        return text.getvalue()

    assert run_ranks(fn, 3) == [f"out {rank}\nerr {rank}\n" for rank in range(3)]
    assert (sys.stdout, sys.stderr) == outer


def test_recorded_warnings_stay_with_their_rank_over_a_collective() -> None:
    outer = warnings.showwarning, warnings.filters, list(warnings.filters)

    def fn(rank: int) -> list[str]:
        warnings.simplefilter("always")  # for good, as in a process of its own
        with warnings.catch_warnings(record=True) as seen:
            dist.barrier()
            warnings.warn(f"rank {rank}", stacklevel=1)
            dist.barrier()
        return [str(warning.message) for warning in seen]

    with warnings.catch_warnings(record=True) as outside:
        assert run_ranks(fn, 3) == [["rank 0"], ["rank 1"], ["rank 2"]]
        with pytest.warns(UserWarning, match="after"):
            warnings.warn("after", stacklevel=1)
    assert outside == []
    assert (warnings.showwarning, warnings.filters, list(warnings.filters)) == outer


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_every_rank_counts_the_same_operations_of_a_sum() -> None:
    """A checkpoint of activations counts operations, and found others than in forward."""

    def operations(rank: int) -> list[str]:
        with CountOperations() as counting:
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3
        return counting.names

    first, last = run_ranks(operations, 2)
    assert first == last


def test_each_rank_has_a_level_of_forward_derivatives_of_its_own() -> None:
    """Torch has one for the process: the second rank's was "nested", or ended with the first's."""

    def fn(rank: int) -> list[float]:
        with forward_ad.dual_level():
            made = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(rank + 1.0))
            dist.barrier()
            with pytest.raises(RuntimeError, match="Nested"):
                forward_ad.enter_dual_level()
            slope = forward_ad.unpack_dual(made * made).tangent
            for _ in range(rank):
                dist.barrier()
        for _ in range(2 - rank):
            dist.barrier()

        def cubed(x: torch.Tensor) -> torch.Tensor:
            dist.barrier()
            return x**3

        _, other = torch.func.jvp(cubed, (torch.tensor(2.0),), (torch.tensor(rank + 1.0),))
        return [float(slope), float(other)]

    assert run_ranks(fn, 3) == [[4.0, 12.0], [8.0, 24.0], [12.0, 36.0]]
    assert forward_ad._current_level == -1
