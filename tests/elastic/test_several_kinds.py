"""Runs of different kinds in one script: each trains as if it were the only one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_shard.errors import ConfigError
from tests.elastic.kinds import NUM_RANKS, run_of, train
from tests.processes import REPOSITORY, run_processes
from tests.strategies.parity import UPSTREAM_WARNINGS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]
_SECONDS = 240


def expected() -> float:
    return run_of("zero2", "in_process", NUM_RANKS, 1)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.few_cases(1)
def test_an_elastic_fit_after_others_found_their_port_taken(num_nodes: int) -> None:
    kinds = ["zero3", "fabric", "elastic", "local_sgd", "elastic"]
    for totals in run_processes(train, NUM_RANKS, kinds=kinds, num_nodes=num_nodes):
        assert totals == pytest.approx([expected()] * len(kinds), rel=1e-5)
