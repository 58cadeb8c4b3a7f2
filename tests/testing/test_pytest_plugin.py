"""The marker `ranks` and the fixture `rank`, in pytest runs of their own."""

import shutil
import sys
import tomllib
from importlib import import_module

import pytest

from tests.testing.inner_pytest import PLUGIN, REPOSITORY, only_our_plugin, run, run_process

__all__ = ["only_our_plugin"]  # a fixture
pytest_plugins = ("pytester",)


def test_a_marked_test_runs_on_every_rank(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
seen = []

@pytest.mark.ranks(4)
def test_with_rank(rank):
    assert rank == dist.get_rank()
    assert total(rank) == 6.0
    seen.append(rank)

@pytest.mark.ranks(3)
def test_without():
    seen.append(dist.get_rank())

def test_both_ran():
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3]
    assert not dist.is_initialized()
""",
    )
    result.assert_outcomes(passed=3)


def test_parameters_classes_and_marks_from_them(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(2)
class TestInAClass:
    def setup_method(self):
        self.seen = []

    @pytest.fixture
    def doubled(self, rank):
        self.seen.append("fixture")
        return 2 * rank

    @pytest.mark.parametrize("x", [1, 2])
    def test_self_is_each_ranks_own(self, rank, x, doubled):
        self.seen.append(rank)
        assert total(x) == 2 * x
        assert self.seen == ["fixture", rank]
        assert doubled == 2 * rank

    @pytest.mark.ranks(3)
    def test_closest_mark_wins(self):
        assert dist.get_world_size() == 3

    @staticmethod
    def test_static(rank):
        assert total(1) == 2

    @classmethod
    def test_class(cls, rank):
        assert total(1) == 2

@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 5)])
def test_mark_from_a_parameter(n, rank):
    assert dist.get_world_size() == n
""",
    )
    result.assert_outcomes(passed=8)


def test_the_report_names_the_failing_rank_and_shows_its_traceback(
    pytester: pytest.Pytester,
) -> None:
    result = run(
        pytester,
        """
import sys

@pytest.mark.ranks(3)
def test_it(rank):
    print(f"rank {rank} was here")
    print(f"rank {rank} complains", file=sys.stderr)
    dist.barrier()
    values = {"rank": rank}
    assert values["rank"] != 1, "that one"
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank = 1",
            ">*assert values*rank*!= 1, *that one*",
            "E*AssertionError: that one",
            "E*assert 1 != 1",
            "E*This was raised on rank 1 of 3.",
            "*Captured stdout of rank 0*",
            "rank 0 was here",
            "*Captured stderr of rank 0*",
            "rank 0 complains",
            "*Captured stdout of rank 1*",
            "rank 1 was here",
            "*Captured stderr of rank 2*",
            "rank 2 complains",
            "FAILED *::test_it*",
        ]
    )
    result.stdout.no_fnmatch_line("*RankFailedError*")


def test_every_rank_that_failed_by_itself_is_named(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.ranks(4)
def test_it(rank):
    assert rank == 0
    dist.barrier()

@pytest.mark.ranks(4)
def test_equal():
    raise ValueError("all")
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*assert 1 == 0",
            "E*This was raised on rank 1 of 4.",
            "E*Rank 2 failed too: AssertionError: assert 2 == 0",
            "E*Rank 3 failed too: AssertionError: assert 3 == 0",
            "E*This was raised on rank 0 of 4.",
            "E*Rank 1, 2, 3 failed too: ValueError: all",
        ]
    )


def test_skip_xfail_and_raises(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import warnings

@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("no need")

@pytest.mark.ranks(2)
def test_skip_of_one_rank(rank):
    if rank == 1:
        pytest.skip("no need here")
    dist.barrier()

@pytest.mark.ranks(2)
def test_skip_hides_no_failure(rank):
    if rank == 0:
        pytest.skip("no need")
    assert rank == 0

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=KeyError, strict=True)
def test_xfail(rank):
    if rank == 1:
        raise KeyError
    dist.barrier()

@pytest.mark.ranks(2)
def test_imperative_xfail():
    pytest.xfail("known")

@pytest.mark.ranks(2)
def test_raises_and_warns_over_a_collective(rank):
    with pytest.raises(ValueError, match="1"), pytest.warns(UserWarning, match=str(rank)):
        dist.barrier()
        warnings.warn(str(rank))
        dist.barrier()
        raise ValueError(total(0.5))

@pytest.mark.ranks(2)
def test_warning(rank):
    warnings.warn(f"seen on rank {rank}")
""",
        "-rs",
    )
    result.assert_outcomes(passed=2, skipped=2, xfailed=2, failed=1, warnings=2)
    result.stdout.fnmatch_lines(
        [
            "E*assert 1 == 0",
            "E*This was raised on rank 1 of 2.",
            "*UserWarning: seen on rank 0",
            "*UserWarning: seen on rank 1",
            "SKIPPED*: no need",
            "SKIPPED*: no need here",
        ]
    )


def test_warnings_as_errors_reach_every_rank(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import warnings

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error::ResourceWarning")
def test_warning(rank):
    with pytest.raises(ResourceWarning):
        warnings.warn("x", ResourceWarning)
""",
    )
    result.assert_outcomes(passed=1)


def test_seed_and_faults(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import torch
from lightning_shard import RankFailedError

@pytest.mark.ranks(2, seed=7)
def test_seed(rank):
    assert torch.initial_seed() == 7 + rank

@pytest.mark.ranks(2, faults=[Fault(1, 1, "drop")])
def test_drop(rank):
    with pytest.raises(RankFailedError, match="rank 1 is gone"):
        dist.barrier()
""",
    )
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("marker", "match"),
    [
        ("ranks", "num_ranks"),
        ("ranks()", "num_ranks"),
        ("ranks(0)", "got num_ranks=0"),
        ("ranks(2, 3)", "positional argument"),
        ("ranks(2, size=3)", "size"),
        ("ranks(2, seed='x')", "got seed='x'"),
        ("ranks(2, faults=[Fault(2, 1, 'fail')])", "below 2"),
    ],
)
def test_wrong_arguments(pytester: pytest.Pytester, marker: str, match: str) -> None:
    result = run(pytester, f"@pytest.mark.{marker}\ndef test_it():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_wrong_arguments.py::test_it: *{match}*"])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("async def test_it(): pass", "an async function"),
        (
            "class TestIt(__import__('unittest').TestCase):\n    def test_it(self): pass",
            "a method of unittest.TestCase",
        ),
        (
            "@pytest.fixture(scope='module')\ndef wide(rank): pass\ndef test_it(wide): pass",
            "fixture 'wide' needs 'rank'*has scope 'module'",
        ),
        (
            "@pytest.fixture\ndef asks(rank, request): pass\ndef test_it(asks): pass",
            "fixture 'asks' needs 'rank'*uses request or params",
        ),
    ],
)
def test_what_cannot_run_on_ranks(pytester: pytest.Pytester, source: str, match: str) -> None:
    result = run(pytester, "pytestmark = pytest.mark.ranks(2)\n" + source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *::test_it: *{match}*"])


def test_output_is_seen_with_s_and_by_capsys(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_print(rank):
    print(f"rank {rank} prints")

@pytest.mark.ranks(2)
def test_capsys(rank, capsys):
    print("something")
    dist.barrier()
    assert rank or capsys.readouterr().out == "something\\n" * 2
"""
    result = run(pytester, source, "-s", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*rank 0 prints", "*rank 1 prints"])
    result = run(pytester, source, "-rP")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*Captured stdout of rank 1*", "rank 1 prints"])


def test_a_time_out_ends_the_ranks(pytester: pytest.Pytester) -> None:
    lines = run_process(
        pytester,
        """
import time

@pytest.mark.ranks(3)
@pytest.mark.timeout(1, method="signal")
def test_stuck(rank):
    dist.barrier()
    while rank == 1:
        time.sleep(0.01)
    dist.barrier()

@pytest.mark.ranks(3)
def test_next():
    dist.barrier()
""",
        "-p",
        "pytest_timeout",
    )
    assert any("Failed: Timeout" in line for line in lines)
    assert "1 failed, 1 passed" in lines[-1]


@pytest.mark.slow
def test_debugger_on_rank_0(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(2)
def test_stop(rank):
    dist.barrier()
    if rank == 0:
        breakpoint()
    dist.barrier()

@pytest.mark.ranks(2)
def test_fail(rank):
    dist.barrier()
    assert rank == 1
"""
    lines = run_process(pytester, source, "--pdb", stdin="p 'at', rank\nc\np 'post', rank\nq\n")
    assert any("('at', 0)" in line for line in lines)
    assert any("('post', 0)" in line for line in lines)
    assert any("1 failed, 1 passed" in line for line in lines)


def test_nothing_heavy_is_imported_without_a_marked_test(pytester: pytest.Pytester) -> None:
    shutil.copy(str(import_module(PLUGIN).__file__), pytester.path / "_lightning_shard_pytest.py")
    pytester.makepyfile(
        """
        import sys

        def test_light():
            assert "_lightning_shard_pytest" in sys.modules
            assert not {"torch", "lightning", "lightning_shard", "numpy"} & set(sys.modules)
        """
    )
    result = pytester.run(
        sys.executable, "-m", "pytest", "-p", "_lightning_shard_pytest", "-p", "no:cacheprovider"
    )
    assert "1 passed" in result.outlines[-1]


def test_the_entry_point_is_this_plugin_outside_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    module = project["project"]["entry-points"]["pytest11"]["lightning_shard"]
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {"lightning_shard/testing/pytest_plugin.py": f"{module}.py"}
