"""A rendezvous server on a thread of the test's own process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep

from lightning_shard.backends.authentication.addresses import listen
from lightning_shard.core.settings import Job
from lightning_shard.elastic.membership.rendezvous_server import JobRules, RendezvousServer
from tests.patience import patient

TOKEN = "token of the tests"


class RunningServer:
    """A `RendezvousServer` on a thread.

    Attributes:
        server: The server; its membership table belongs to the thread.
    """

    def __init__(self, rules: JobRules) -> None:
        listeners = listen("127.0.0.1", 0)
        self.job = Job(host="127.0.0.1", port=listeners[0].getsockname()[1], token=TOKEN)
        self.server = RendezvousServer(rules, listeners, TOKEN)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive()


@contextlib.contextmanager
def running_server(rules: JobRules) -> Iterator[RunningServer]:
    """Run a rendezvous server; it ends when its last participant has gone."""
    server = RunningServer(rules)
    server.thread.start()
    yield server
    server.thread.join(patient(60))
    assert server.has_ended


def wait_until(is_so: Callable[[], bool], seconds: float = 90.0) -> None:
    """Wait for what another thread does; a hang is a failure."""
    deadline = monotonic() + patient(seconds)
    while not is_so():
        assert monotonic() < deadline, "nothing happened"
        sleep(0.005)
