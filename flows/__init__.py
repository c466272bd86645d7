"""Flows: order only. A Prefect server follows them where one is named or runs (tracked.py).

The defaults below keep Prefect off the network and from starting servers by itself; anything the
user has set wins.
"""

import os

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)
