"""What this machine lacks and how to mend it: Python, packages, system libraries, space, GPU."""

import ctypes
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"

LIBRARIES = {
    "libusb-1.0.so.0": ("libusb-1.0-0", "Open3D"),
    "libgomp.so.1": ("libgomp1", "Open3D, scikit-learn"),
    "libX11.so.6": ("libx11-6", "Open3D, Blender"),
    "libXrender.so.1": ("libxrender1", "Blender"),
    "libXfixes.so.3": ("libxfixes3", "Blender"),
    "libXi.so.6": ("libxi6", "Blender"),
    "libXxf86vm.so.1": ("libxxf86vm1", "Blender"),
    "libxkbcommon.so.0": ("libxkbcommon0", "Blender"),
    "libSM.so.6": ("libsm6", "Blender"),
    "libICE.so.6": ("libice6", "Blender"),
    "libGL.so.1": ("libgl1", "Open3D, Blender"),
    "libEGL.so.1": ("libegl1", "Open3D, Blender"),
}
SPACE_ADVISED = 5 << 30


def missing_libraries() -> dict[str, tuple[str, str]]:
    """Libraries that cannot be loaded: name -> (Debian package, who needs it)."""
    missing = {}
    for name, about in LIBRARIES.items():
        try:
            ctypes.CDLL(name)
        except OSError:
            missing[name] = about
    return missing


def wrong_packages() -> list[str]:
    """Locked packages that are absent or of another version."""
    wrong = []
    for line in LOCK.read_text().splitlines() if LOCK.exists() else []:
        name, _, version = line.split("#")[0].strip().partition("==")
        if not version:
            continue
        try:
            found = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "absent"
        if found != version:
            wrong.append(f"{name} is {found}, the lock file says {version}")
    return wrong


def gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return f"GPU: {torch.cuda.get_device_name(0)}"
    return "GPU: none; detectors run on the CPU"


def install_libraries(missing: dict[str, tuple[str, str]]) -> bool:
    """Install with apt where we may; else print the exact command."""
    packages = sorted({package for package, _ in missing.values()})
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if not (shutil.which("apt-get") and os.geteuid() == 0):
        print(f"missing system libraries; install them with: sudo {' '.join(command)}")
        return False
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update"], command):
        if subprocess.run(step, env=environment, stdout=subprocess.DEVNULL).returncode:
            print(f"this failed: {' '.join(step)}; run it by hand to see why")
            return False
    return True


def examine(install: bool = False) -> int:
    """Print what is fine and what is not; 0 if nothing is missing, else 2."""
    problems = 0

    def say(good: bool, text: str) -> None:
        nonlocal problems
        problems += not good
        print(f"{'ok ' if good else 'BAD'} {text}")

    version = sys.version_info
    say(version[:2] == (3, 11), f"Python {version.major}.{version.minor} (3.11 is needed by bpy)")
    wrong = wrong_packages()
    say(
        not wrong,
        "packages agree with the lock file"
        if not wrong
        else "; ".join(wrong[:5]) + "; run `make setup`",
    )
    missing = missing_libraries()
    if missing and install and install_libraries(missing):
        missing = missing_libraries()
    for name, (package, users) in missing.items():
        say(False, f"{name} is missing ({users} need it): apt-get install {package}")
    if not missing:
        say(True, "system libraries of Open3D and Blender")
    free = shutil.disk_usage(Path.cwd()).free
    mark = "ok " if free > SPACE_ADVISED else "LOW"
    print(f"{mark} {free / 2**30:.1f} GiB of disk space free here (5 GiB are advised)")
    print(f"    {os.cpu_count()} cores; {gpu()}")
    return 2 if problems else 0
