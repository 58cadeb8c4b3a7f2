"""The marker `ranks` and the fixture `rank`, for pytest.

    @pytest.mark.ranks(4)
    def test_sum(rank):                          # runs on four ranks of an in-process world
        tensor = torch.tensor(float(rank))
        torch.distributed.all_reduce(tensor)
        assert tensor.item() == 6.0

pytest loads this file in every run on a machine that has the package, so it imports neither torch
nor the package until a test carries the marker. For the same reason a wheel holds it outside the
package, as the entry point's module `_lightning_shard_pytest`. The work is done in `rank_test`.
"""

from typing import Any

import pytest

_MARKER = (
    "ranks(num_ranks, *, seed=0, faults=()): run the test on every rank of an in-process world, "
    "with torch.distributed initialised; see lightning_shard.testing.run_ranks."
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `ranks`."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """Return the rank, from 0, that runs; for tests marked with `@pytest.mark.ranks(n)`."""
    marked = request.node.get_closest_marker("ranks") is not None
    problem = (
        "is known only while a rank runs: name it as an argument of the test or of a fixture, in "
        "place of request.getfixturevalue"
        if marked
        else "needs the marker @pytest.mark.ranks(n)"
    )
    pytest.fail(f"{request.node.nodeid}: the fixture 'rank' {problem}.", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check the marked tests that are left after deselection."""
    for item in items:
        _test_of(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep pytest from making the fixtures that each rank makes for itself."""
    if (test := _test_of(item)) is not None:
        test.set_up()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Run a marked test on its ranks."""
    if (test := _test_of(pyfuncitem)) is None:
        return None
    test.run()
    return True


def _test_of(item: pytest.Item) -> Any:
    """Return the `RankTest` of a marked test, or None for any other."""
    if item.get_closest_marker("ranks") is None:
        return None
    from lightning_shard.testing.rank_test import RankTest

    return RankTest(item)
