"""The example of elastic training loses a rank, gets one, and ends below the bigram model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.commands import REPOSITORY
from tests.patience import patient


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_is_killed_and_another_one_added() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [str(REPOSITORY / "examples" / "elastic.sh")],
        env=os.environ | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(280),
        check=False,
    )
    assert run.returncode == 0, run.stdout
    sizes = re.findall(r"(\d) ranks:", run.stdout)
    assert sizes == ["4", "3", "4"], run.stdout
    assert re.search(r"^\$ kill -9 \d+$", run.stdout, re.MULTILINE), run.stdout
    assert re.search(r"^\$ LIGHTNING_SHARD_JOB=", run.stdout, re.MULTILINE), run.stdout
    loss, bigram = re.findall(r"validation loss (\S+) .* model: (\S+)\)", run.stdout)[-1]
    assert float(loss) < float(bigram), run.stdout
    assert len(run.stdout.splitlines()) < 25
