"""The launcher of an elastic job's processes, none of which takes the others along.

    train.py ──starts──> server, train.py (local rank 1), train.py (local rank 2) ...
    somebody ──LIGHTNING_SHARD_JOB=host:port train.py──> a newcomer
    after a run of ranks that stay: server; the ranks are there, and tell each other where it is

Lightning's own ends all with the first that fails.
"""

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from lightning_shard.backends.authentication.addresses import loopback_of
from lightning_shard.backends.authentication.token import find_token
from lightning_shard.backends.objects import broadcast_object
from lightning_shard.core import settings
from lightning_shard.elastic.membership.rendezvous_server import JobRules, start_rendezvous_server
from lightning_shard.environments.checks import check_adopted
from lightning_shard.environments.launchers.processes import ProcessLauncher

_LOOPBACK = "127.0.0.1"


class ElasticLauncher(ProcessLauncher):
    """Starts the rendezvous server and this host's ranks, where nobody else has started them."""

    takes_newcomers = True

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        rules: JobRules,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._rules = rules
        self._children: list[subprocess.Popen[bytes]] = []
        self._token_is_given = False

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return False  # it starts the server

    @override
    def _begin(self) -> None:
        if settings.job() is None and self.cluster_environment.creates_processes_externally:
            self._begin_job()  # else before the children are started

    @override
    def kill(self, signum: Any) -> None:
        """Pass on a signal to the ranks started here, but SIGTERM: that asks one rank to leave."""
        if signum == signal.SIGTERM:
            return
        for child in self._children:
            child.send_signal(signum)  # does nothing to one that has ended

    @override
    def _call_children_scripts(self) -> None:
        self._begin_job()
        super()._call_children_scripts()
        self._children = self.procs
        self.procs = ProcessLauncher.watched = []  # Lightning's observer finds none
        if self.num_nodes == 1 or self.cluster_environment.global_rank() == 0:
            _say_how_to_join([child.args for child in self._children], self._token_is_given)

    def _begin_job(self) -> None:
        """Start the server, if that is for this process to do, and tell who will need it."""
        environment = self.cluster_environment
        self._token_is_given = bool(settings.job_token())
        alone = self.num_nodes == 1 and not environment.creates_processes_externally
        if alone:
            job = start_rendezvous_server(self._rules, _LOOPBACK, 0, settings.job_token())
        elif (world := dist.group.WORLD) is not None:
            job = self._job_of_running_ranks(world)
            self._children = list(ProcessLauncher.watched)
            ProcessLauncher.watched.clear()  # which Lightning's observer knows
        else:
            # Where processes that nobody has told of each other's random numbers find the server.
            job = self._job_at(environment.main_port)
            if environment.global_rank() == 0:
                start_rendezvous_server(self._rules, job.host, job.port, job.token)
        settings.set_job(job)

    def _job_of_running_ranks(self, world: dist.ProcessGroup) -> settings.Job:
        """Start the server at a free port: at the main one the ranks have met, and listen yet."""
        rank, size = self.cluster_environment.global_rank(), self._rules.initial_size
        check_adopted(rank, size, "Trainer")
        if rank > 0:
            return self._job_at(broadcast_object(world, None, src=0))
        job = start_rendezvous_server(self._rules, self._host, 0, settings.job_token())
        broadcast_object(world, job.port, src=0)
        return job

    @property
    def _host(self) -> str:
        host = self.cluster_environment.main_address
        # With a token, ranks of other hosts may join what has begun on one.
        return loopback_of(host) if self.num_nodes == 1 and not self._token_is_given else host

    def _job_at(self, port: int) -> settings.Job:
        host, rank = self._host, self.cluster_environment.global_rank()
        token = find_token(port, on_one_host=settings.is_loopback(host), rank=rank)
        return settings.Job(host=host, port=port, token=token)


def _say_how_to_join(commands: Sequence[Any], token_is_given: bool) -> None:
    """Print, once for the job, how to add a rank; a token is no matter for logs."""
    job = settings.job()
    assert job is not None
    variables = " ".join(f"{name}={value}" for name, value in settings.job_variables(job).items())
    command = commands[0] if commands else [sys.executable, *sys.orig_argv[1:]]
    hint = " (LIGHTNING_SHARD_JOB_TOKEN must be this job's)" if token_is_given else ""
    print(f"To add a rank{hint}: {variables} {shlex.join(command)}", file=sys.stderr, flush=True)
