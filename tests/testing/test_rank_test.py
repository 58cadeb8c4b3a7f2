"""Which fixtures a test on ranks has once, and which on every rank."""

import pytest

from tests.testing.inner_pytest import only_our_plugin, run

__all__ = ["only_our_plugin"]  # a fixture
pytest_plugins = ("pytester",)


def test_a_fixture_that_needs_rank_is_made_on_every_rank(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
made = []

@pytest.fixture
def base(rank):
    made.append(("base", rank))
    return total(rank)

@pytest.fixture
def pair(base, rank):
    yield base + rank
    dist.barrier()
    made.append(("ended", rank))

class TestPair:
    @pytest.fixture(autouse=True)
    def automatic(self, rank):
        made.append(("automatic", rank))

    @pytest.mark.ranks(2)
    def test_pair(self, pair, rank):
        assert pair == 1 + rank

def test_made():
    assert sorted(made) == [(n, r) for n in ("automatic", "base", "ended") for r in (0, 1)]
""",
    )
    result.assert_outcomes(passed=2)


def test_other_fixtures_are_made_once_and_copied(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import os

@pytest.fixture
def model():
    return nn.Linear(2, 2)

@pytest.fixture
def optimizer(model):
    from torch.optim import SGD
    return SGD(model.parameters(), lr=0.1)

@pytest.fixture(scope="module")
def shared():
    return []

@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [[]])
def test_copies(rank, model, optimizer, shared, given, tmp_path, monkeypatch, request):
    weight = model.weight.detach().clone()
    dist.all_reduce(weight)
    assert (weight == 2 * model.weight).all()         # the same weights at first
    assert optimizer.param_groups[0]["params"][0] is model.weight
    model.weight.data.fill_(rank)
    given.append(rank)
    shared.append(rank)
    dist.barrier()
    assert (model.weight == rank).all()               # and each rank's own
    assert given == [rank]
    assert sorted(shared) == [0, 1]
    assert tmp_path.is_dir()
    monkeypatch.setenv("SET_BY_RANK", "1")
    assert "test_copies" in request.node.name

def test_monkeypatch_was_undone():
    assert "SET_BY_RANK" not in os.environ
""",
    )
    result.assert_outcomes(passed=2)


def test_a_fixture_that_cannot_be_copied(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import threading

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.mark.ranks(2)
def test_lock(lock):
    pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*'lock' cannot be copied for the ranks other than 0 (TypeError*"])


def test_rank_without_the_marker(pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(rank):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: the fixture 'rank' needs the marker @pytest.mark.ra*"])


def test_rank_by_getfixturevalue(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it(request):\n    request.getfixturevalue('rank')\n"
    result = run(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*name it as an argument of the test*"])


def test_a_projects_own_rank_fixture_wins(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.fixture
def rank():
    return "mine"

def test_plain(rank):
    assert rank == "mine"

@pytest.mark.ranks(2)
def test_marked(rank):
    assert rank == "mine"
    assert total(1) == 2
""",
    )
    result.assert_outcomes(passed=2)
