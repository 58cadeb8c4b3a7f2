"""A Ray cluster of two nodes on this machine; Ray tells nodes by their addresses.

node 1  the machine's own address, two workers        node 2  127.0.0.2, two workers
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import REPOSITORY

_OBJECT_STORE_BYTES = 100 * 2**20


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Start two nodes, and end every process of theirs."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError as error:
        pytest.fail(f"{error}. Run these tests by `make test-ray`, which installs Ray.")
    import ray

    given = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{given.get('PYTHONPATH', '')}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    node = {"num_cpus": 2, "object_store_memory": _OBJECT_STORE_BYTES}
    nodes = Cluster()
    try:
        nodes.add_node(include_dashboard=False, **node)
        nodes.add_node(node_ip_address="127.0.0.2", **node)
        ray.init(address=nodes.address, log_to_driver=bool(given.get("RAY_TEST_LOGS")))
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        os.environ.clear()
        os.environ.update(given)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A folder that every node of the cluster sees."""
    return tmp_path / "storage"
