"""Which raw files the work under way in this thread must find as they were hashed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Watch:
    """`digests` by real path ("" where it was not hashed); `compared` were read and were right."""

    digests: Mapping[str, str] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def digest_of(self, path: str) -> str | None:
        return self.digests.get(path)


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def current_watch() -> Watch:
    return _watch.get() or Watch()


@contextmanager
def watching(digests: Mapping[str, str]) -> Iterator[Watch]:
    watch = Watch(digests)
    token = _watch.set(watch)
    try:
        yield watch
    finally:
        _watch.reset(token)
