"""Rounds a second over HTTP with 1, 10 and 50 clients; round 1,000 of a test against round 1.

A round is what the published client does: ask for the data, post detection, post characterization.
The server is a process of its own and every post is on the disk when it is answered.

`python -m benchmarks.condda_server`
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tasks.condda.server.client import HttpHarness

ROOT = Path(__file__).parents[1]
TEST = "CONDDA.1.1.1"
DOMAIN = "image_classification"
ROUNDS, SIZE, COLUMNS = 1_000, 32, 20
SECONDS = 10
CHILD = (
    "import sys; from pathlib import Path; from tasks.condda.server.serve import serve; "
    "serve(Path(sys.argv[1]), Path(sys.argv[2]), port=0)"
)


def write_data(root: Path) -> None:
    folder = root / "CONDDA" / DOMAIN
    folder.mkdir(parents=True)
    half = ROUNDS * SIZE // 2
    lines = [f"image_{row:06d}.png,{int(row >= half)},{row % 10}" for row in range(2 * half)]
    text = "\n".join(["id,detection,classification", *lines, ""])
    (folder / f"{TEST}_single_df.csv").write_text(text)
    about = {"protocol": "CONDDA", "known_classes": 10, "round_size": SIZE}
    (folder / f"{TEST}_metadata.json").write_text(json.dumps(about))


@contextmanager
def server(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-c", CHILD, str(folder / "data"), str(folder / "state")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def opened(client: HttpHarness) -> str:
    return client.session_request(
        test_ids=[TEST], protocol="CONDDA", domain=DOMAIN, novelty_detector_version="bench-1"
    )


def play_round(client: HttpHarness, session: str, number: int) -> float:
    """One round; gives the seconds that its two posts took."""
    about = {"test_id": TEST, "round_id": number, "session_id": session}
    ids = client.dataset_request(**about).decode().split()
    vector = ",0.05" * COLUMNS
    files = {
        "detection": "".join(f"{name},0.25\n" for name in ids).encode(),
        "characterization": "".join(f"{name}{vector}\n" for name in ids).encode(),
    }
    start = time.perf_counter()
    for kind, body in files.items():
        client.post_results(result_files={kind: body}, **about)
    return time.perf_counter() - start


def rounds_a_second(url: str, clients: int) -> float:
    def agent(_: int) -> int:
        with HttpHarness(url) as client:
            session, number = opened(client), 0
            while time.perf_counter() < end and number < ROUNDS:
                play_round(client, session, number)
                number += 1
        return number

    start = time.perf_counter()
    end = start + SECONDS
    with ThreadPoolExecutor(clients) as pool:
        played = sum(pool.map(agent, range(clients)))
    return played / (time.perf_counter() - start)


def post_seconds(url: str) -> list[float]:
    with HttpHarness(url) as client:
        session = opened(client)
        return [play_round(client, session, number) for number in range(ROUNDS)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        with server(folder) as url:
            rounds_a_second(url, 1)  # reads the test, warms up
            print(f"rounds of {SIZE} instances, {COLUMNS} columns   rounds/s    ratio")
            speeds = {clients: rounds_a_second(url, clients) for clients in (1, 10, 50)}
            for clients, speed in speeds.items():
                print(f"{clients:>2} clients {speed:36.1f} {speed / speeds[1]:8.2f}")
            seconds = post_seconds(url)
            first, last = statistics.median(seconds[:50]), statistics.median(seconds[-50:])
            print("posting a round (median of 50)         ms    ratio")
            print(f"rounds 1 to 50 {1e3 * first:26.2f} {1:8.2f}")
            print(f"rounds {ROUNDS - 49} to {ROUNDS} {1e3 * last:24.2f} {last / first:8.2f}")


if __name__ == "__main__":
    main()
