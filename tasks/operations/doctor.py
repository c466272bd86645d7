"""What this machine lacks and how to mend it: Python, packages, torch, libraries, space, GPU.

Runs with any Python 3.8 or newer and nothing but its standard library, before anything is installed
(`make doctor`), and looks at an environment from outside: what is imported there is imported by a
child process, so that a broken library is a line and no crash.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = (3, 11)

BLENDER = "the renderer `blender`"
OPEN3D = "Open3D (PLY, STL and GLB files of 3DOS)"
LIBRARIES = {
    "libusb-1.0.so.0": ("libusb-1.0-0", (OPEN3D,)),
    "libgomp.so.1": ("libgomp1", (OPEN3D,)),
    "libX11.so.6": ("libx11-6", (OPEN3D, BLENDER)),
    "libXrender.so.1": ("libxrender1", (BLENDER,)),
    "libXfixes.so.3": ("libxfixes3", (BLENDER,)),
    "libXi.so.6": ("libxi6", (BLENDER,)),
    "libXxf86vm.so.1": ("libxxf86vm1", (BLENDER,)),
    "libxkbcommon.so.0": ("libxkbcommon0", (BLENDER,)),
    "libSM.so.6": ("libsm6", (BLENDER,)),
    "libICE.so.6": ("libice6", (BLENDER,)),
    "libGL.so.1": ("libgl1", (OPEN3D, BLENDER)),
    "libEGL.so.1": ("libegl1", (OPEN3D, BLENDER)),
}
"""Library -> Debian package, and what does not work without it."""

SPACE_ADVISED = 5 << 30
CHILD_SECONDS = 300

INSTALLED = """
import importlib.metadata, json, sys
packages = [(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()]
print(json.dumps({"version": sys.version_info[:2], "packages": packages}))
"""
TORCH = """
import torch
print(torch.__version__)
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
"""


def missing_libraries() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Libraries that cannot be loaded, as in `LIBRARIES`."""
    missing = {}
    for name, about in LIBRARIES.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            missing[name] = about
    return missing


def missing_libraries_of(user: str) -> list[str]:
    """Those without which `BLENDER` or `OPEN3D` does not load."""
    return [name for name, (_, users) in missing_libraries().items() if user in users]


def install_libraries() -> None:
    """Install missing libraries with apt where we may; else print the exact command.

    Never a reason to stop: what does not work without them is said by `examine`.
    """
    missing = missing_libraries()
    packages = sorted({package for package, _ in missing.values()})
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if not (shutil.which("apt-get") and os.geteuid() == 0):
        users = " and ".join(sorted({user for _, needs in missing.values() for user in needs}))
        print(
            f"system libraries are missing, which only {users} need; the rest works without. To "
            f"install them: sudo {' '.join(command)}",
            flush=True,
        )
        return
    print(f"installing missing system libraries as root: {' '.join(command)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update"], command):
        if subprocess.run(step, env=environment, stdout=subprocess.DEVNULL).returncode:
            print(f"this failed: {' '.join(step)}; run it by hand to see why", flush=True)
            return


def wrong_packages(versions: dict[str, str], lock: Path) -> list[str]:
    """Packages of a lock file that are absent or of another version than it says."""
    wrong = []
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE):
        version_here = versions.get(_canonical(name), "absent")
        if version_here.partition("+")[0] != version:
            wrong.append(f"{name} is {version_here}, the lock file says {version}")
    return wrong


def examine(python: str | None = None) -> int:
    """Print what is fine and what is not of this machine and of the environment of `python`.

    0 if what is installed works, else 2. What merely has not been installed yet, or switches
    something off that has a substitute, is named and does not count.
    """
    problems = 0

    def say(mark: str, text: str) -> None:
        nonlocal problems
        problems += mark == "BAD"
        print(f"{mark:4} {text}", flush=True)

    installed = _answer_of(python, INSTALLED) if python else None
    if installed is None or installed.returncode:
        _say_python(say)
        if installed is None:
            say("todo", "packages are not installed yet: run `make setup`")
        else:
            last = _last_line(installed.stderr)
            say("BAD", f"{python} does not run ({last}): remove .venv, then run `make setup`")
    else:
        facts = json.loads(installed.stdout)
        _say_environment(say, str(python), facts["version"], dict(facts["packages"]))
    _say_libraries(say)
    free = shutil.disk_usage(str(ROOT)).free
    text = f"{free / 2**30:.1f} GiB of disk space free here"
    advised = f"{SPACE_ADVISED >> 30} GiB are advised"
    say("ok" if free > SPACE_ADVISED else "warn", f"{text} ({advised}; a CUDA build of torch: 10)")
    say("ok", f"{os.cpu_count()} cores")
    _say_sandbox(say)
    return 2 if problems else 0


def _say_sandbox(say: Callable[[str, str], None]) -> None:
    """What keeps a foreign file that takes over its reader from the rest of the machine."""
    arguments = (None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    version = ctypes.PyDLL(None).syscall(444, *arguments)  # landlock_create_ruleset: its version
    if version > 0:
        say("ok", f"Landlock {version}: readers of foreign files see those files alone")
    else:
        say("warn", "no Landlock (Linux 5.13 or newer): readers of foreign files see all files")


def _say_python(say: Callable[[str, str], None]) -> None:
    """Whether there is a Python that an environment can be made of."""
    command = ["bash", str(ROOT / ".ci" / "install" / "python")]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        say("BAD", answer.stderr.strip())
    else:
        say("ok", f"Python 3.11: {answer.stdout.strip()}")


def _say_environment(
    say: Callable[[str, str], None], python: str, version: list[int], packages: dict[str, str]
) -> None:
    shown = ".".join(map(str, version))
    right = tuple(version) == VERSION
    cure = "" if right else "; 3.11 is needed: remove .venv, then run `make setup`"
    say("ok" if right else "BAD", f"Python {shown} in {python}{cure}")
    versions = {_canonical(name): version for name, version in packages.items()}
    lock = Path(python).parents[1] / "requirements.txt"
    if lock.exists():
        wrong = wrong_packages(versions, lock)
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        text = "packages agree with the lock files"
        if wrong:
            text = f"{'; '.join(wrong[:5])}{more}: run `make setup EXTRAS=none`"
        say("BAD" if wrong else "ok", text)
    if "torch" not in versions:
        say("todo", "torch is not installed; detectors need it: run `make setup EXTRAS=learn`")
        return
    answer = _answer_of(python, TORCH)
    if answer.returncode:
        say(
            "BAD",
            f"torch {versions['torch']} does not load ({_last_line(answer.stderr)}): run "
            "`make setup TORCH=cuda`, which installs it with its libraries, or TORCH=cpu",
        )
        return
    build, _, gpu = answer.stdout.strip("\n").partition("\n")
    text = f"GPU: {gpu}" if gpu else "GPU: none; detectors run on the CPU"
    say("ok", f"torch {build}; {text}")


def _say_libraries(say: Callable[[str, str], None]) -> None:
    """A warning for each missing system library: what it switches off, and the cure."""
    missing = missing_libraries()
    for name, (package, users) in missing.items():
        tools = " and ".join(users)
        say("warn", f"{name} is missing, without it {tools} cannot run: apt-get install {package}")
    if not missing:
        say("ok", "system libraries of Open3D and Blender")


def _answer_of(python: str, code: str) -> subprocess.CompletedProcess:
    """What a child process of that interpreter says; a dead or missing one is an answer too."""
    command = [python, "-c", code]
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            cwd=str(Path(python).parent),  # so that nothing here is taken for a library
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(prog="doctor", description=__doc__)
    parser.add_argument("--python", help="interpreter of the environment to look at")
    parser.add_argument(
        "--install", action="store_true", help="only install missing system libraries (as root)"
    )
    parsed = parser.parse_args()
    if parsed.install:
        install_libraries()
        return 0
    # Not resolved: the link is what makes an interpreter one of an environment.
    return examine(str(Path(parsed.python).absolute()) if parsed.python else None)


if __name__ == "__main__":
    sys.exit(main())
