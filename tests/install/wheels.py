"""Wheels of a few hundred bytes and an index of them in a folder: pip's work without a network."""

import base64
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path


def wheel(name: str, version: str, needs: Sequence[str] = (), body: str = "") -> bytes:
    """A pure wheel with one module, which is named after it."""
    module = name.replace("-", "_")
    folder = f"{module}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {line}" for line in needs]
    metadata += [f"Provides-Extra: {x}" for x in re.findall(r"extra == '(\w+)'", "".join(needs))]
    files = {
        f"{module}.py": body,
        f"{folder}/METADATA": "\n".join(metadata) + "\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            record.append(f"{path},sha256={digest.decode().rstrip('=')},{len(text)}")
        record.append(f"{folder}/RECORD,,")
        archive.writestr(zipfile.ZipInfo(f"{folder}/RECORD"), "\n".join(record) + "\n")
    return buffer.getvalue()


class Index:
    """A folder that pip reads as an index."""

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[str, dict[str, bytes]] = {}

    def add(self, name: str, version: str, needs: Sequence[str] = (), body: str = "") -> None:
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        self.put(name, file, wheel(name, version, needs, body))

    def put(self, name: str, file: str, data: bytes) -> None:
        self.files.setdefault(name, {})[file] = data
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
        links = [
            f'<a href="{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>'
            for file, data in self.files[name].items()
        ]
        (folder / "index.html").write_text(f"<!DOCTYPE html><body>{''.join(links)}</body>")

    def hashes(self, name: str, version: str) -> set[str]:
        return {
            hashlib.sha256(data).hexdigest()
            for file, data in self.files[name].items()
            if f"-{version}-" in file or f"-{version}." in file
        }

    def environment(self) -> dict[str, str]:
        """Settings with which pip knows this index and no other."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
        return kept | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.root.as_uri(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
        }
