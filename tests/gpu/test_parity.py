"""On 1 to 8 GPUs over NCCL, every scheme trains as on CPU ranks, and stages as on one GPU."""

from functools import cache
from itertools import product

import pytest

from tests.gpu.schemes import NUM_STEPS, SCHEMES, train_precisely, train_scheme
from tests.processes import run_processes
from tests.strategies.parity import STRATEGIES, Run, assert_bitwise_equal, assert_parity, ignoring

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), *ignoring()]
CLOSE = {"32-true": {}, "bf16-mixed": {"rtol": 2e-2, "atol": 2e-3}}
CLOSE["16-mixed"] = CLOSE["bf16-mixed"]
CASES = [
    pytest.param(name, size, marks=pytest.mark.gpus(size))
    for name, scheme in SCHEMES.items()
    for size in scheme.sizes()
]


def check(found: Run, name: str, size: int) -> None:
    """Compare what GPUs have made with what CPU ranks make."""
    rtol, atol = SCHEMES[name].tolerance
    early = SCHEMES[name].clips_early
    expected = train_scheme(name, size, "in_process")
    assert_parity(found, expected, num_steps=NUM_STEPS, rtol=rtol, atol=atol, clips_early=early)


@cache
def runs_of(name: str, size: int) -> list[Run]:
    arguments = {"name": name, "num_ranks": size, "backend": "nccl", "accelerator": "gpu"}
    return run_processes(train_scheme, size, fresh=True, timeout_seconds=240, **arguments)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_gpus_train_as_cpu_ranks_do(name: str, size: int) -> None:
    check(runs_of(name, size)[0], name, size)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_gpus_end_with_the_same_bits(name: str, size: int) -> None:
    first, *others = runs_of(name, size)
    for other in others:
        assert_bitwise_equal(other, first)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name, scheme in SCHEMES.items() for size in scheme.sizes() if size in (2, 4)],
)
def test_ranks_that_share_a_gpu_train_as_cpu_ranks_do(name: str, size: int) -> None:
    check(train_scheme(name, size, "in_process", "gpu"), name, size)


@cache
def on_one_gpu(precision: str) -> Run:
    arguments = {"strategy": None, "precision": precision, "num_ranks": 1, "accelerator": "gpu"}
    (run,) = run_processes(train_precisely, 1, fresh=True, timeout_seconds=240, **arguments)
    return run


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, CLOSE)))
def test_two_gpus_train_as_one_does(strategy: str, precision: str) -> None:
    arguments = {"strategy": strategy, "precision": precision, "num_ranks": 2}
    arguments |= {"accelerator": "gpu", "fresh": True, "timeout_seconds": 240}
    first, _ = run_processes(train_precisely, 2, **arguments)
    assert_parity(first, on_one_gpu(precision), num_steps=NUM_STEPS, **CLOSE[precision])


@pytest.mark.parametrize(("strategy", "precision"), list(product(STRATEGIES, CLOSE)))
def test_ranks_that_share_a_gpu_train_as_one_does(strategy: str, precision: str) -> None:
    arguments = {"precision": precision, "num_ranks": 2, "accelerator": "gpu"}
    (run,) = run_processes(
        train_precisely,
        1,
        fresh=True,
        timeout_seconds=240,
        strategy=strategy,
        shares=True,
        **arguments,
    )
    assert_parity(run, on_one_gpu(precision), num_steps=NUM_STEPS, **CLOSE[precision])
