"""Functions for `tasks.ingest.native.pool`: some well-behaved, the others each wrong in one way.

numpy is imported where it is needed, so that most children of the tests start fast.
"""

import atexit
import ctypes
import errno
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from schemas.errors import MissingDependency, RecordError

LIBC = ctypes.PyDLL(None)
"""Unlike CDLL, a PyDLL call keeps the GIL: no thread, signal handler or timer of Python can run."""

HELD: list[Any] = []


def echo(item: Any, out_dir: Path) -> dict[str, Any]:
    return {"item": item}


def work(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Does what `item["do"]` says, or squares `item["n"]`."""
    do = item.get("do")
    if do is not None:
        globals()[do]()
    n = item["n"]
    scratch_file = out_dir / "square"
    scratch_file.write_text(str(n * n))
    return {"square": int(scratch_file.read_text()), "raw": bytes(n), "pid": os.getpid()}


def hang_with_gil() -> None:
    LIBC.sleep(1000)


def hang_in_regex() -> None:
    re.match(r"(a|a)*$", "a" * 60 + "b")


def hang_with_grandchild() -> None:
    print("grandchild", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    LIBC.sleep(1000)


def segfault() -> None:
    print("about to read address zero", flush=True)
    ctypes.string_at(0)


def abort() -> None:
    LIBC.abort()


def eat_memory_in_python() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(8 << 20))


def eat_memory_in_c() -> None:
    """As C code that does not check malloc: it writes to what it gets, in the end to NULL."""
    LIBC.malloc.restype = ctypes.c_void_p
    while True:
        ctypes.memset(LIBC.malloc(ctypes.c_size_t(8 << 20)), 1, 8 << 20)


def leak() -> None:
    HELD.append(bytearray(b"x") * (40 << 20))


def flood_for_ever() -> None:
    line = b"flood\n" * 10_000
    while True:
        os.write(1, line)
        os.write(2, line)


def flood_and_return() -> None:
    line = b"flood\n" * 10_000
    for _ in range(1000):
        os.write(1, line)


def flood_and_segfault() -> None:
    flood_and_return()
    ctypes.string_at(0)


def segfault_on_exit() -> None:
    atexit.register(ctypes.string_at, 0)


def exit_code_on_exit() -> None:
    atexit.register(os._exit, 3)


def hang_on_exit() -> None:
    atexit.register(LIBC.sleep, 1000)


def exit_silently() -> None:
    os._exit(0)


def exit_badly() -> None:
    os._exit(9)


def sys_exit() -> None:
    sys.exit("no more")


def kill_itself() -> None:
    os.kill(os.getpid(), 9)


def fail_in_company() -> None:
    """Crashes the second time in one process, as a library that leaves a bad state behind."""
    HELD.append(1)
    if len(HELD) > 1:
        ctypes.string_at(0)


def raise_value_error() -> None:
    raise ValueError(f"bad header in {object()!r}")


def raise_record_error() -> None:
    raise RecordError("frame_count", "0 frames decoded, expected 1 or more")


def raise_import_error() -> None:
    import no_such_library_anywhere  # noqa: F401


def raise_missing_dependency() -> None:
    raise MissingDependency("libmesh is absent: apt-get install libmesh")


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def forge(item: int, out_dir: Path) -> dict[str, Any]:
    """Leaves a file where the result belongs and goes, as a writer cut off half-way."""
    if item == 1:
        body = b'{"value": {"item": 1}, "parts": {}}'
        (out_dir.parent / f"{out_dir.stem}.json").write_bytes(b"0" * 64 + b"\n" + body)
        os._exit(0)
    return {"item": item}


class DamagedLater(dict):
    """Its first part is overwritten after it was saved and hashed, as by a stray writer."""

    part: Path

    def items(self) -> Any:
        yield from super().items()
        self.part.write_bytes(b"damaged")


def damage_part(item: int, out_dir: Path) -> dict[str, Any]:
    value = DamagedLater(raw=b"intact!")
    value.part = out_dir.parent / f"{out_dir.stem}.0.bin"
    return value if item == 1 else dict(value)


def write_large_file(item: int, out_dir: Path) -> dict[str, Any]:
    with (out_dir / "large").open("wb") as file:
        file.truncate(item)
    return {"bytes": item}


def returned(item: str, out_dir: Path) -> Any:
    """Results that cannot be handed over, by name, and one that can."""
    import numpy as np

    return {
        "good": {"x": 1.5},
        "nan": {"x": [1.0, float("nan")]},
        "infinity": {"x": float("-inf")},
        "set": {"x": {1, 2}},
        "numpy_scalar": {"x": np.float32(1)},
        "objects": {"x": np.array([object()])},
        "masked": {"x": np.ma.masked_array([1, 2], [True, False])},
        "nested_array": {"x": [np.zeros(2)]},
        "list": [1, 2],
        "none": None,
        "integer_key": {1: "x"},
    }[item]


def sample_arrays() -> dict[str, Any]:
    import numpy as np

    return {
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(7, np.int8),
        "bool": np.array([True, False]),
        "uint8": np.arange(256, dtype=np.uint8).reshape(4, 8, 8),
        "float16": np.array([1.5, np.nan, np.inf], np.float16),
        "big_endian": np.array([1, 2, 3], ">f8"),
        "complex": np.array([1 + 2j], np.complex64),
        "text": np.array(["α", "beta"]),
        "time": np.array(["2020-01-01"], "datetime64[D]"),
        "fields": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
        "strided": np.arange(20)[::3],
    }


def arrays(item: Any, out_dir: Path) -> dict[str, Any]:
    raw = bytes(range(256))
    return {"before": [1, "a"], **sample_arrays(), "raw": raw, "after": {"deep": None}}


def surroundings(item: Any, out_dir: Path) -> dict[str, Any]:
    import tempfile

    return {
        "modules": sorted(sys.modules),
        "environment": dict(os.environ),
        "temporary": tempfile.gettempdir(),
        "out_dir": str(out_dir),
        "empty": not list(out_dir.iterdir()),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "data": resource.getrlimit(resource.RLIMIT_DATA),
    }


def mark_and_hang(item: str, out_dir: Path) -> dict[str, Any]:
    """Writes its process number to the file `item` of its folder, if it is named, then hangs."""
    if not item:
        return {}
    partial = out_dir / f"{item}.tmp"
    partial.write_text(str(os.getpid()))
    partial.rename(out_dir / item)
    LIBC.sleep(1000)
    return {}


def slow(item: float, out_dir: Path) -> dict[str, Any]:
    time.sleep(item)
    return {}


def reach(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Which of these it can do: read its item and other files, write, connect."""
    import socket

    def tried(action: Any) -> str:
        try:
            action()
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return "done"

    return {
        "item": tried(Path(item["path"]).read_bytes),
        "other": tried(Path(item["other"].removeprefix("file:")).read_bytes),
        "write": tried(lambda: Path(item["path"]).with_name("written").write_text("x")),
        "scratch": tried(lambda: (out_dir / "written").write_text("x")),
        "network": tried(lambda: socket.create_connection(("127.0.0.1", item["port"]), 5).close()),
        "secret": os.environ.get("AWS_SECRET_ACCESS_KEY"),
    }


def quote_path(item: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    raise ValueError(f"{item['path']} is bad, says {Path(__file__).parents[1]}")
