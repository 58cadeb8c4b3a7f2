"""What holds for every test: one thread, an environment of its own, no group skipped as a whole.

Products of parameters are more than `make test` has time for where each case is a training. In the
folders `SAMPLED`, and where a test is marked `each_value`, it runs cases that have each value of
each parameter between them. Of a test that is marked `few_cases(n)` it runs n that have as many
values as so few can, others for each test so that all tests together have each scheme.
`make test-all` runs every case.

    stage 0 to 3  x  2 ranks, 4 ranks
        each_value      (0, 2) (1, 4) (2, 2) (3, 2)
        few_cases(2)    (1, 4) (3, 2)

Torch is imported by fixtures only: the process that hands tests to others needs none of it.
"""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.patience import patient

TESTS = Path(__file__).parent
SAMPLED = {
    *("checkpoint", "context_parallel", "data_parallel", "elastic", "optim", "pipeline_parallel"),
    *("planning", "precision", "strategies", "tensor_parallel"),
}

# No property is about time.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

_ran: Counter[str] = Counter()
_skipped: Counter[str] = Counter()


@pytest.fixture
def torchs_own_kernels() -> Iterator[None]:
    """Keep oneDNN out, which computes an LSTM in bfloat16 on some processors only."""
    import torch

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # the context of torch.backends warns, of GPUs
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: with models this small several only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def checked_states() -> None:
    """Let every change of a state word be checked, as in debug runs."""
    from lightning_shard.core.states import Checks

    Checks.are_on = True


_WRAPPED = ("__init__", "__setattr__", "__delattr__")


@pytest.fixture(autouse=True)
def own_loaders() -> Iterator[None]:
    """Put back what Lightning wraps while it asks for loaders, and leaves where a hook raises."""
    from torch.utils.data import BatchSampler, DataLoader

    classes = (DataLoader, BatchSampler)
    before = [{name: vars(one).get(name) for name in _WRAPPED} for one in classes]
    yield
    for one, methods in zip(classes, before, strict=True):
        for name, method in methods.items():
            if method is None and name in vars(one):
                delattr(one, name)
            elif vars(one).get(name) is not method:
                setattr(one, name, method)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Put back what launchers and trainers leave: `os.environ`, who warns, determinism."""
    import torch

    before = dict(os.environ)
    rank_before = getattr(rank_zero_only, "rank", None)
    mode_before = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(mode_before)
    if rank_before is not None:
        rank_zero_only.rank = rank_before
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.hookimpl(tryfirst=True)  # before those that are slow are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that the sample of a test leaves out."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and _is_sampled(item):
            cases[item.nodeid.split("[")[0]].append(item)
    for name, group in cases.items():
        quick = _sample(name, group)
        for number, item in enumerate(group):
            if number not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A file's runs of reference stay in its caches: collections took a quarter of the time."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Leave what there is out of the garbage collections that runs make."""
    gc.collect()
    gc.freeze()


def _is_sampled(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow"):
        return False
    folders = item.path.relative_to(TESTS).parts[:2]
    marks = map(item.get_closest_marker, ("each_value", "few_cases"))
    return not SAMPLED.isdisjoint(folders) or any(marks)


def _sample(name: str, group: Sequence[Any]) -> set[int]:
    cases = [{(k, repr(v)) for k, v in one.callspec.params.items()} for one in group]
    few = group[0].get_closest_marker("few_cases")
    if few is None:
        return covering(cases, range(len(cases)))
    return covering(cases, spread(name, len(cases), *few.args), *few.args)


def spread(name: str, num_cases: int, num_quick: int) -> list[int]:
    """Return the numbers of all cases, the first so many evenly spread from one by the name."""
    first = crc32(name.encode())
    even = [(first + k * num_cases // num_quick) % num_cases for k in range(num_quick)]
    return list(dict.fromkeys((*even, *((first + k) % num_cases for k in range(num_cases)))))


def covering(
    cases: Sequence[set[tuple[str, str]]], order: Iterable[int], num_quick: int | None = None
) -> set[int]:
    """Return the numbers of a few cases that have each value of the others, too; greedily.

    Args:
        cases: Name and value of each parameter, by case.
        order: Numbers of the cases, those first that are taken where others have as many values.
        num_quick: Number of cases that are wanted, if there are as many; None for as few as can be.
    """
    left, found = list(order), set[int]()
    every = set().union(*cases)
    missing = set(every)
    while left and (missing if num_quick is None else len(found) < num_quick):
        best = max(left, key=lambda number: len(cases[number] & missing))
        left.remove(best)
        found.add(best)
        missing = (missing - cases[best]) or (every if num_quick is not None else set())
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the plug-in that measures
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test take longer before it counts as hanging where others keep the machine busy."""
    marker = item.get_closest_marker("timeout") or pytest.mark.timeout.mark
    seconds, *others = marker.args or (item.config.getini("timeout"),)
    patience = pytest.mark.timeout(patient(float(seconds)), *others, **marker.kwargs)
    item.add_marker(patience, append=False)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    group = report.nodeid.split("::")[0]
    if report.skipped:
        _skipped[group] += 1
    elif report.when == "call":
        _ran[group] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail when a file's tests were all skipped: that hides what they were written for."""
    hidden = sorted(group for group in _skipped if not _ran[group])
    if hidden and exitstatus == pytest.ExitCode.OK:
        print(f"\nevery test was skipped in {', '.join(hidden)}: deselect them by marker instead")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
