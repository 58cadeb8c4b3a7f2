"""A running job is attacked at every port, and goes on as if nothing had been."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.security.attacks import Attacker, overhear, poison
from tests.security.jobs import LAUNCHERS, SECRET, Job, forked_job, running_job
from tests.security.program import fit
from tests.security.sockets import Listener

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*treespec, LeafSpec:FutureWarning", "ignore:.*num_workers.* argument"
)

NUM_ATTACKS, NUM_CONNECTIONS = 200, 1000
KEYS = [f"default_pg/0//{part}" for part in ("cpu//0/rank_0", "cpu//0/0", "worker_count:1")]


def is_torchruns(listener: Listener) -> bool:
    return "distributed.run" in listener.process


def is_launchers(listener: Listener) -> bool:
    """Whether it is torchrun's or mpirun's own: no code of this package runs there."""
    program = listener.process.partition(" ")[0].rpartition("/")[2]
    return is_torchruns(listener) or program in ("prterun", "mpirun")


def attack_all(job: Job, listeners: list[Listener], num_attacks: int, flood: int) -> str:
    """Attack each port in turn; return what was heard, for the search for secrets."""
    mark = job.folder / "unpickled"
    transcripts = [words for one in listeners for words in overhear(one.reached_at, SECRET)]
    attacker = Attacker(0, mark, transcripts)
    try:
        made = Counter(
            attacker.attack(number // len(listeners), listeners[number % len(listeners)].reached_at)
            for number in range(num_attacks)
        )
        assert len(made) == min(len(attacker.kinds), -(-num_attacks // len(listeners)))
        for listener in listeners if flood else []:
            attacker.flood(listener.reached_at, flood // len(listeners))
        open_stores = [one.reached_at for one in listeners if is_torchruns(one)]
        read = [poison(place, KEYS, mark) for place in open_stores]
        assert attacker.admitted == []
        assert not any(transcript and SECRET.encode() in transcript for transcript in transcripts)
        (job.folder / "attacked").touch()
        job.wait_for(lambda: len(list(job.folder.glob("met-*"))) == 2)
    finally:
        attacker.close()
    assert not mark.exists(), "what a stranger has sent was unpickled"
    return f"{attacker.heard!r} {read!r}"


def check_unharmed(folder: Path, expected: float) -> None:
    totals = [float(one) for one in (folder / "totals").read_text().split()]
    assert totals == pytest.approx([expected] * 2, rel=1e-5)
    for rank in range(2):
        met = (folder / f"met-{rank}").read_text()
        assert re.fullmatch(r"\{'path': .*user's object.*\} 8", met)


@pytest.mark.parametrize(
    ("num_attacks", "num_connections"),
    [(20, 0), pytest.param(NUM_ATTACKS, NUM_CONNECTIONS, marks=pytest.mark.slow)],
)
def test_a_job_that_is_attacked_at_every_port_goes_on(
    num_attacks: int, num_connections: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forked_job(tmp_path, monkeypatch) as job:
        listeners = job.listeners()
        assert listeners
        assert [one for one in listeners if not one.is_loopback] == []
        heard = attack_all(job, listeners, num_attacks, num_connections)
        job.end()
    assert SECRET not in heard
    check_unharmed(tmp_path, fit("zero3_in_process"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_jobs_of_every_launcher_go_on(launcher: str, tmp_path: Path) -> None:
    with running_job(launcher, tmp_path) as job:
        listeners = job.listeners()
        print(*listeners, sep="\n")
        assert [one for one in listeners if not one.is_loopback and not is_launchers(one)] == []
        heard = attack_all(job, listeners, NUM_ATTACKS, NUM_CONNECTIONS)
        job.end()
        assert SECRET not in heard + job.output()
    check_unharmed(tmp_path, fit("zero3_in_process"))
