"""Messages to people: NOVELTY_NOTIFY holds addresses, `notify` in service.yaml sets it.

An address is a webhook (http:// or https://, gets JSON) or anything that apprise knows, such as
mailto://. Several stand apart by blanks. A message that cannot be sent stops nothing.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from schemas.errors import ConfigError

NOTIFY = "NOVELTY_NOTIFY"
log = logging.getLogger(__name__)


def addresses() -> list[str]:
    """Where messages of this process go."""
    return os.environ.get(NOTIFY, "").split()


def check_addresses(targets: Sequence[str]) -> None:
    """Refuse what apprise cannot send to, without sending anything."""
    for address in targets:
        if _service(address) is None:
            kind = address.partition(":")[0]
            raise ConfigError(
                f"notify: an address that begins with {kind}: is not understood; write https://…, "
                "mailto://user:password@host, or another address of apprise"
            )


def notify(title: str, body: str) -> list[str]:
    """Send to every address; those that it could not be sent to, without their passwords."""
    failed = []
    for address in addresses():
        service = _service(address)
        if service is None:
            failed.append(address.partition(":")[0] + "://…")
        elif not service.notify(title=title, body=body):
            failed.append(service.url(privacy=True))
    for name in failed:
        log.warning("the message %r could not be sent to %s", title, name)
    return failed


def _service(address: str) -> Any:
    """What sends to the address; a plain web address is a webhook that takes JSON."""
    import apprise

    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it would print passwords
    known = apprise.Apprise.instantiate(address, suppress_exceptions=True)
    scheme, mark, rest = address.partition("://")
    if known is None and mark and scheme in ("http", "https"):
        webhook = f"{'json' if scheme == 'http' else 'jsons'}://{rest}"
        known = apprise.Apprise.instantiate(webhook, suppress_exceptions=True)
    return known
