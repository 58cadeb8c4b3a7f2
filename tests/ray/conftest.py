"""A Ray cluster of two nodes on this machine; Ray tells nodes by their addresses.

node 1  the machine's own address, two workers        node 2  127.0.0.2, two workers
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import REPOSITORY

_NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
SECOND_NODE = {**_NODE, "node_ip_address": "127.0.0.2"}


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
    nodes = Cluster()
    try:
        nodes.add_node(include_dashboard=False, **_NODE)
        nodes.add_node(**SECOND_NODE)
        ray.init(address=nodes.address, log_to_driver=bool(given.get("RAY_TEST_LOGS")))
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()
        os.environ.clear()
        os.environ.update(given)
