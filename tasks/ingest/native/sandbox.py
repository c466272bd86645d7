"""What a child process that reads foreign files may still do: almost nothing, where Linux can.

A clean environment (`environment`), no network (`without_network`), and by Landlock no file but the
interpreter, the libraries, its items and its scratch folder (`fenced`). `novelty doctor` says where
the kernel has no Landlock. Imports nothing heavy: every child pays for it.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KEPT = ("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
KEPT_PREFIXES = ("LC_", "LIBGL_", "MESA_", "EGL_", "PYTHONDONTWRITE")
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/opt", "/nix", "/proc", "/sys")
DEVICES = ("null", "zero", "full", "random", "urandom", "shm", "dri", "kfd", "nvidia*")

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
PATH_BENEATH = 1
READ = 0b1101  # execute, read a file, list a folder
OF_FILES = 0b1100_0000_0000_0111  # what makes sense for a file: with write, truncate, ioctl
RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
"""All rights over files that a version of Landlock knows."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a child may know: no keys, no tokens, no addresses."""
    return {
        name: value
        for name, value in variables.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES)
    }


def landlock_version() -> int:
    """0 where the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def without_network() -> bool:
    """Leave the network, if the kernel lets us; call it before any thread starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) == 0:
        return True
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    libc.prctl(PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    return True


def fenced(items: Any, scratch: Path) -> bool:
    """Allow no file but libraries and items to be read, and none outside scratch to be written.

    Call it before any thread starts: it holds for this thread and those that it starts. False where
    the kernel has no Landlock.
    """
    version = landlock_version()
    if not version:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    rights = RIGHTS[min(version, max(RIGHTS))]
    # Since version 4 connecting and listening by TCP can be refused, too.
    attributes = _Ruleset(rights, 3 if version >= 4 else 0)
    size = 16 if version >= 4 else 8
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    if rules < 0:
        return False

    def allow(paths: Iterable[str], allowed: int) -> None:
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (OSError, ValueError):
                continue
            kinds = allowed if os.path.isdir(path) else allowed & OF_FILES
            rule = _Beneath(kinds & rights, opened)
            libc.syscall(ADD_RULE, rules, PATH_BENEATH, ctypes.byref(rule), 0)
            os.close(opened)

    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    code = [entry for entry in sys.path if entry and os.path.isabs(entry)]
    allow([*SYSTEM, sys.prefix, sys.base_prefix, *code, *filter(None, libraries)], READ)
    allow(paths_in(items), READ)
    allow([str(scratch)], rights)
    allow([path for name in DEVICES for path in glob.glob(f"/dev/{name}")], rights)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = libc.syscall(RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return done


def paths_in(value: Any) -> list[str]:
    """Absolute paths anywhere in an item."""
    if isinstance(value, str):
        return [value] if value.startswith("/") else []
    if isinstance(value, dict):
        return [path for part in value.values() for path in paths_in(part)]
    if isinstance(value, list):
        return [path for part in value for path in paths_in(part)]
    return []
