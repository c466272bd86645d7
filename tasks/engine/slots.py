"""Which shards in processes of their own run at once: they share this machine's cores and GPUs.

A shard on a CPU takes as many cores as it has threads, one on a GPU a place on the GPU with the
fewest shards. Who finds no place waits; a shard that wants more than there is runs alone.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


def gpu_count() -> int:
    """GPUs that processes here may use, told without an import of torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(GPU_FOLDER.iterdir())) if GPU_FOLDER.is_dir() else 0


class Slots:
    """Places on this machine, taken by `with`."""

    def __init__(self, cores: int, gpus: int) -> None:
        self.cores, self.gpus = cores, gpus
        self._cores_taken = self._on_cpu = 0
        self._on_gpu = [0] * gpus
        self._changed = threading.Condition()

    @contextmanager
    def taken(
        self, device: str, threads: int = 1, at_once: int | None = None, per_gpu: int = 1
    ) -> Iterator[str]:
        """The device to use: `cpu`, or `cuda:N` where there is a GPU and `device` allows it.

        `at_once` shards share the CPU (none: as many as their threads leave cores for), `per_gpu`
        each GPU. A GPU that is named by its number is left to the caller.
        """
        if device in ("auto", "cuda") and self.gpus:
            number = self._take_gpu(per_gpu)
            try:
                yield f"cuda:{number}"
            finally:
                self._give_gpu(number)
            return
        cores = min(threads, self.cores)

        def fits() -> bool:
            if at_once is not None:
                return self._on_cpu < at_once
            return self._cores_taken + cores <= self.cores

        with self._changed:
            self._changed.wait_for(fits)
            self._cores_taken, self._on_cpu = self._cores_taken + cores, self._on_cpu + 1
        try:
            yield "cpu" if device == "auto" else device
        finally:
            with self._changed:
                self._cores_taken, self._on_cpu = self._cores_taken - cores, self._on_cpu - 1
                self._changed.notify_all()

    def _take_gpu(self, per_gpu: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: min(self._on_gpu) < per_gpu)
            number = self._on_gpu.index(min(self._on_gpu))
            self._on_gpu[number] += 1
            return number

    def _give_gpu(self, number: int) -> None:
        with self._changed:
            self._on_gpu[number] -= 1
            self._changed.notify_all()
