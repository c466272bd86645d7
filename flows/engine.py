"""Where the shards of a flow run: threads of this process, or a cluster, by one setting.

NOVELTY_RUNNER is `local` (the default), `dask` or `ray`; NOVELTY_CLUSTER is the address of a
scheduler that runs already. A shard always waits in a thread here, and only the work goes to the
cluster: so workers need this project and the lake, but neither Prefect nor a way to its API, and a
worker that dies is the cluster's business (docs/cluster.md).
"""

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from schemas.errors import ConfigError, MissingDependency, NativeError
from schemas.extras import require_library
from tasks.engine.flow_run import FlowRun
from tasks.engine.places import CORES, GPU, Cluster

log = logging.getLogger(__name__)

RUNNERS = ("local", "dask", "ray")
CONNECT_SECONDS = 20
RETRIES = 3
"""How often Ray gives a shard to another worker after one died; Dask does so three times, too."""

Run = TypeVar("Run", bound=FlowRun)


def open_run(kind: type[Run]) -> Run:
    """A run of a flow of that kind, on the cluster that NOVELTY_RUNNER names."""
    with contextlib.ExitStack() as stack:
        return kind(_chosen_cluster(stack), stack.pop_all())


def _chosen_cluster(stack: contextlib.ExitStack) -> Cluster | None:
    name = os.environ.get("NOVELTY_RUNNER") or "local"
    address = os.environ.get("NOVELTY_CLUSTER") or None
    if name not in RUNNERS:
        raise ConfigError(f"NOVELTY_RUNNER is {name!r}; set it to one of: {', '.join(RUNNERS)}")
    if name == "local":
        if address:
            raise ConfigError("NOVELTY_CLUSTER is set; set NOVELTY_RUNNER=dask too, or unset it")
        return None
    return DaskCluster(address, stack) if name == "dask" else RayCluster(address, stack)


class DaskCluster:
    """Workers of a Dask scheduler; without an address, processes of this machine for one flow."""

    def __init__(self, address: str | None, stack: contextlib.ExitStack):
        require_library("distributed")
        from distributed import Client, LocalCluster

        logging.getLogger("distributed").setLevel(logging.ERROR)  # else a page for each flow
        if address is None:
            count = os.cpu_count() or 1
            here = LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                memory_limit=0,  # how much a stage may use is its own business
                dashboard_address="127.0.0.1:0",  # its usual port may be taken
            )
            address = stack.enter_context(here).scheduler_address
            log.info(f"dask: started {count} workers on this machine for this flow")
        try:
            client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no Dask scheduler answers at {address} ({error}); check NOVELTY_CLUSTER, or "
                "unset it to start workers on this machine"
            ) from None
        self._client = stack.enter_context(client)
        if not self.workers():
            log.info(f"dask: {address} has no workers yet; waiting for one")

    def run(
        self,
        name: str,
        needs: Mapping[str, float],
        function: Callable[..., None],
        *arguments: Any,
    ) -> None:
        from distributed import CancelledError, KilledWorker

        future = self._client.submit(
            function,
            *arguments,
            key=f"{name.partition('/')[0]}-{uuid.uuid4().hex}",
            resources=dict(needs) or None,
            pure=False,
        )
        try:
            future.result()
        except KilledWorker as error:
            raise NativeError(
                f"{name}: {error.allowed_failures + 1} workers died while they made it; the log "
                f"of the last, {error.last_worker.address}, says more"
            ) from None
        except CancelledError as error:
            raise NativeError(
                f"{name}: the Dask scheduler let it go ({error}); if it is gone, start it again, "
                "and the same command goes on"
            ) from None

    def most(self, resource: str) -> float:
        workers = self._ask(self._identity)["workers"].values()
        return max((worker["resources"].get(resource, 0) for worker in workers), default=0)

    def workers(self) -> int:
        return len(self._ask(self._client.nthreads))

    def threads(self) -> int:
        return sum(self._ask(self._client.nthreads).values())

    def _identity(self) -> Any:
        # Not the client's `scheduler_info`: between two of its steps it forgets all workers.
        return self._client.sync(self._client.scheduler.identity, n_workers=-1)

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except OSError as error:
            raise NativeError(
                f"the Dask scheduler answers no longer ({error}); start it again, and the same "
                "command goes on"
            ) from None


class RayCluster:
    """Workers of a Ray cluster; without an address, processes of this machine for one flow."""

    def __init__(self, address: str | None, stack: contextlib.ExitStack):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise MissingDependency(
                "NOVELTY_RUNNER=ray needs the package ray, which `make setup` does not install; "
                "run `.venv/bin/python -m pip install ray`, or set NOVELTY_RUNNER=dask"
            ) from None
        self._ray = ray
        self._errors = ray.exceptions
        here = {"address": "local", "include_dashboard": False}
        try:
            if address:
                _knock(address)  # Ray itself would try for minutes
            where = {"address": address} if address else here
            ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, ValueError, RuntimeError, self._errors.RayError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({error}); check NOVELTY_CLUSTER, or "
                "unset it to start workers on this machine"
            ) from None
        stack.callback(ray.shutdown)
        if not address:
            count = self.threads()
            log.info(f"ray: started {count} workers on this machine for this flow")

    def run(
        self,
        name: str,
        needs: Mapping[str, float],
        function: Callable[..., None],
        *arguments: Any,
    ) -> None:
        remote = self._ray.remote(function).options(
            name=name,
            num_cpus=needs.get(CORES, 1),
            num_gpus=needs.get(GPU, 0),
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
        )
        try:
            self._ray.get(remote.remote(*arguments))
        except self._errors.RayTaskError as error:
            if isinstance(error.cause, self._errors.RayError):  # it did not even begin
                raise NativeError(f"{name}: a worker could not run it: {error.cause}") from None
            raise error.cause from None
        except self._errors.WorkerCrashedError:
            raise NativeError(
                f"{name}: {RETRIES + 1} workers died while they made it; Ray's logs say more"
            ) from None
        except self._errors.RayError as error:
            raise NativeError(
                f"{name}: Ray let it go ({error}); if the cluster is gone, start it again, and the "
                "same command goes on"
            ) from None

    def most(self, resource: str) -> float:
        name = {CORES: "CPU"}.get(resource, resource)  # Ray counts cores unasked
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return max((resources.get(name, 0) for resources in nodes), default=0)

    def workers(self) -> int:
        return sum(node["Alive"] for node in self._ray.nodes())

    def threads(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 1))


def _knock(address: str) -> None:
    """Raise OSError or ValueError where nobody listens at host:port, ray://host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
