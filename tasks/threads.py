"""Linear algebra on one thread: the order of its sums, and so the last bits, depend on how many.

Shards run side by side already, and a lake must get the same bytes from a laptop, from a worker of
a cluster and from a machine with many cores. torch has a setting of its own (`use_threads`).
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
