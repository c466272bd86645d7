"""Entry point of a child process: `python -m tasks.ingest.native.worker <folder>/request.json`.

Enters: the request of `pool.py` beside it (function, modules to import first, items, limits).
Leaves, in the same folder: `ready` once the imports are done, then for each item in order one
`<i>.json` = sha256 of the body, a newline, the body: what the function returned, or its error.
Arrays and bytes lie beside it, named with their sha256 in the body. A result appears by rename, so
the first item without one is the item being worked on.
Imports nothing heavy itself: its start is paid for every batch and every second try.
"""

import ctypes
import errno
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from schemas.errors import MissingDependency, MissingExtra, RecordError
from schemas.extras import missing_extra, require_library
from tasks.ingest.native.sandbox import fenced, without_network

STOP = 78
"""Exit code that says: no item is to blame, the machine or the installation is."""

MISSING = "missing"
"""File with the sentence about an extra that is not installed, for the parent to raise."""

PR_SET_PDEATHSIG = 1


def main(request_path: Path) -> None:
    request = json.loads(request_path.read_bytes())
    without_network()  # before the next line, which a change of the user's name space undoes
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["parent"]:
        os._exit(STOP)
    memory = request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (memory, memory))

    folder = request_path.parent
    fenced(request["items"], folder)
    try:
        for name in request["imports"]:
            require_library(name)
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, MissingDependency) as error:
        _stop(error, folder)
    (folder / "ready").touch()
    for i, item in enumerate(request["items"]):
        work = folder / f"{i}.work"
        work.mkdir()
        try:
            _write(_pack(function(item, work), folder, i), folder, i)
        except RecordError as error:
            body = {"rule": error.rule, "message": error.message}
            _write(_unreadable(item) or body, folder, i)
        except MemoryError as error:
            _write({"rule": "native_memory", "message": _described(error)}, folder, i)
            os._exit(0)
        except (ImportError, MissingDependency) as error:
            _stop(error, folder)
        except (Exception, SystemExit) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                _stop(error, folder)
            body = {"rule": "native_error", "message": _described(error), "output": _trace(error)}
            _write(_unreadable(item) or body, folder, i)
        shutil.rmtree(work, ignore_errors=True)


def _unreadable(item: Any) -> dict[str, Any] | None:
    """A file that went away is a fault of its own, whatever the function made of it."""
    try:
        if isinstance(item, dict) and isinstance(item.get("path"), str):
            with open(item["path"], "rb"):
                pass
    except OSError as error:
        return {"rule": "unreadable", "message": f"cannot be read: {error.strerror}"}
    return None


def _pack(value: Any, folder: Path, i: int) -> dict[str, Any]:
    """The body for a returned dict; arrays and bytes go to files and leave None in their place."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RecordError(
            "native_error", f"returned {type(value).__name__}, expected a dict with string keys"
        )
    numpy = sys.modules.get("numpy")
    plain: dict[str, Any] = {}
    parts: dict[str, tuple[str, str]] = {}
    for key, entry in value.items():
        try:
            if numpy is not None and type(entry) is numpy.ndarray:
                path = folder / f"{i}.{len(parts)}.npy"
                numpy.save(path, entry, allow_pickle=False)
            elif type(entry) is bytes:
                path = folder / f"{i}.{len(parts)}.bin"
                path.write_bytes(entry)
            else:
                json.dumps(entry, allow_nan=False)
                plain[key] = entry
                continue
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                "native_error",
                f"returned a result whose {key!r} cannot be handed over ({error}); expected finite "
                "numbers, strings, lists, dicts, bytes, or numpy arrays without objects",
            ) from error
        with path.open("rb") as file:
            parts[key] = (path.name, hashlib.file_digest(file, "sha256").hexdigest())
        plain[key] = None
    return {"value": plain, "parts": parts}


def _write(body: dict[str, Any], folder: Path, i: int) -> None:
    encoded = json.dumps(body).encode()
    temporary = folder / f"{i}.json.tmp"
    temporary.write_bytes(hashlib.sha256(encoded).hexdigest().encode() + b"\n" + encoded)
    temporary.replace(folder / f"{i}.json")


def _described(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


def _trace(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def _stop(error: Exception, folder: Path) -> NoReturn:
    if isinstance(error, ImportError):
        error = missing_extra(error) or error
    if isinstance(error, MissingExtra):
        (folder / MISSING).write_text(str(error))
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(STOP)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
