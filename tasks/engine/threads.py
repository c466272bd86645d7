"""Linear algebra on one thread: the order of its sums, and so the last bits, depend on how many.

Shards run side by side already, and a lake must get the same bytes from a laptop, from a worker of
a cluster and from a machine with many cores. Trainings have a setting of their own for torch.
"""

import os
from functools import cache

# Read by OpenBLAS when it is loaded: numpy and scipy each bring one, scipy's mostly comes later.
os.environ["OPENBLAS_NUM_THREADS"] = "1"


@cache
def one_blas_thread() -> None:
    """For libraries that this process had loaded before."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")


def one_torch_thread() -> None:
    """For stages that use torch for linear algebra and have no setting of threads."""
    import torch

    torch.set_num_threads(1)
