"""The place that a message names is the user's, through whatever torch wraps its functions in."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from lightning_shard.core.call_site import find_call_site
from lightning_shard.errors import CollectiveMismatchError, DeadlockError
from lightning_shard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def other_way(rank: int) -> None:
    """What the ranks but the first call instead."""
    dist.barrier()


def _exchange() -> None:
    here, other = torch.zeros(2), 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, here, other), dist.P2POp(dist.irecv, here.clone(), other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.all_reduce(here)


def _compiled() -> None:
    @torch.compile(backend="eager")
    def reduce(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", dist.group.WORLD) + 1

    reduce(torch.ones(2))


def _dtensor() -> None:
    local = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    local.redistribute(placements=[Replicate()]).to_local()


def _wrapped() -> None:
    @functools.lru_cache
    def reduce() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(functools.partial(dist.all_reduce, torch.ones(2)))

    reduce()


CALLS: dict[str, Callable[[], Any]] = {
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
    "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
    "batch_isend_irecv": _exchange,
    "compiled": _compiled,
    "dtensor": _dtensor,
    "functional": lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum(),
    "old all_gather": lambda: dist._all_gather_base(torch.ones(4), torch.ones(2)),
    "old reduce_scatter": lambda: dist._reduce_scatter_base(torch.ones(1), torch.ones(2)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2)),
    "wrapped": _wrapped,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mismatch_names_the_line_behind_a_wrapper(name: str) -> None:
    """A mismatch was said to be called by a wrapper."""
    with pytest.raises((CollectiveMismatchError, DeadlockError)) as caught:
        run_ranks(lambda rank: other_way(rank) if rank else CALLS[name](), 2)
    places = [line for line in str(caught.value).splitlines() if ".py:" in line]
    assert places
    assert all(__file__ in line for line in places), str(caught.value)


def test_a_rank_that_runs_none_of_the_users_code_names_who_began_the_run() -> None:
    """Its thread begins in this package: it names the line that has begun the run."""
    found: dict[str, Any] = {"find": find_call_site}
    exec(compile("def site(rank): return find()", "<frozen nothing>", "exec"), found)
    mine, other = run_ranks(found["site"], 2)
    assert mine == other
    assert mine.filename == __file__


def test_a_name_that_is_no_file_is_the_users() -> None:
    found: dict[str, Any] = {"find": find_call_site}
    exec(compile("\n\nsite = find()", "<stdin>", "exec"), found)
    assert str(found["site"]) == "<stdin>:3"
