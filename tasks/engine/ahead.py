"""What an iterator gives, made in a thread before it is asked for, up to a limit."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

T = TypeVar("T")
_END = object()


@contextmanager
def ahead(items: Iterator[T], count: int) -> Iterator[Iterator[T]]:
    """The items in their order; at most `count` wait. What the iterator raises comes out here.

    Leaving the block ends the thread and closes the iterator, also before its end.
    """
    waiting: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(count)
    left = threading.Event()

    def put(item: Any, error: BaseException | None = None) -> None:
        while not left.is_set():
            try:
                waiting.put((item, error), timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put(item)
                if left.is_set():
                    break
            put(_END)
        except BaseException as error:
            put(_END, error)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def taken() -> Iterator[T]:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield cast(T, item)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        left.set()
        thread.join()
