"""What a round costs the CONDDA server: CPU, rounds a second, the slowest requests.

A round is what the published client does: ask for the data, post detection, post characterization.
The server is a process of its own and every post is on the disk when it is answered. The clients
are plain sockets, so that they cost little. `--against` names another server of the published API
that serves the same tests (`--data` writes them); both are measured in turns. `--against-pid` is
its process, whose CPU time (with that of those it started) is read.

`python -m benchmarks.condda_server`
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
TEST = "CONDDA.1.1.1"
DOMAIN = "image_classification"
ROUNDS, SIZE, COLUMNS = 1_000, 32, 20
BOUNDARY = "round"
CHILD = (
    "import sys; from pathlib import Path; from tasks.condda.server.serve import serve; "
    "serve(Path(sys.argv[1]), Path(sys.argv[2]), port=0)"
)


def write_data(root: Path) -> None:
    folder = root / "CONDDA" / DOMAIN
    folder.mkdir(parents=True, exist_ok=True)
    half = ROUNDS * SIZE // 2
    lines = [f"image_{row:06d}.png,{int(row >= half)},{row % 10}" for row in range(2 * half)]
    text = "\n".join(["id,detection,classification", *lines, ""])
    (folder / f"{TEST}_single_df.csv").write_text(text)
    about = {"protocol": "CONDDA", "known_classes": 10, "round_size": SIZE}
    (folder / f"{TEST}_metadata.json").write_text(json.dumps(about))


@contextmanager
def server(data: Path, state: Path) -> Iterator[tuple[str, int]]:
    """Address and process of our server."""
    command = [sys.executable, "-c", CHILD, str(data), str(state)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split(" at ")[1].split()[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of those it has started, from the system's table."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents[number] = int(fields[1])
        ticks[number] = int(fields[11]) + int(fields[12])
    family = {pid}
    for number in sorted(parents):
        if parents[number] in family:
            family.add(number)
    return sum(ticks[number] for number in family) / os.sysconf("SC_CLK_TCK")


class Client:
    """One agent on one connection, opened again where the server closes it."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self.address = (parts.hostname or "", parts.port or 80)
        self.socket: socket.socket | None = None
        self.seconds: list[float] = []
        configuration = {"protocol": "CONDDA", "domain": DOMAIN, "hints": []}
        configuration |= {"novelty_detector_version": "bench-1", "detection_threshold": 0.5}
        files = {"test_ids": f"{TEST}\n", "configuration": json.dumps(configuration)}
        self.session = json.loads(self.send("POST", "/session", files))["session_id"]

    def play_round(self, number: int) -> None:
        about = {"session_id": self.session, "test_id": TEST, "round_id": number}
        query = "&".join(f"{name}={value}" for name, value in about.items())
        ids = self.send("GET", f"/session/dataset?{query}").decode().split()
        assert len(ids) == SIZE, ids
        for kind, values in (
            ("detection", ",0.25\n"),
            ("characterization", ",0.05" * COLUMNS + "\n"),
        ):
            identification = json.dumps({**about, "result_types": kind})
            body = "".join(name + values for name in ids)
            files = {"test_identification": identification, f"{kind}_file": body}
            answer = self.send("POST", "/session/results", files)
            assert answer == b"OK", answer

    def end(self) -> None:
        """Complete the test, end the session, hang up."""
        self.send("DELETE", f"/test?session_id={self.session}&test_id={TEST}")
        self.send("DELETE", f"/session?session_id={self.session}")
        self.close()

    def send(self, method: str, target: str, files: dict[str, str] | None = None) -> bytes:
        body = b""
        head = f"{method} {target} HTTP/1.1\r\nHost: {self.address[0]}:{self.address[1]}\r\n"
        if files is not None:
            parts = "".join(
                f"--{BOUNDARY}\r\nContent-Disposition: form-data; "
                f'name="{name}"; filename="{name}"\r\n\r\n{text}\r\n'
                for name, text in files.items()
            )
            body = f"{parts}--{BOUNDARY}--\r\n".encode()
            head += f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
        start = time.perf_counter()
        answer = self._exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.seconds.append(time.perf_counter() - start)
        return answer

    def _exchange(self, request: bytes) -> bytes:
        for _ in range(2):  # a connection kept open may have been closed meanwhile
            if self.socket is None:
                self.socket = socket.create_connection(self.address)
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self.socket.sendall(request)
                received = self.socket.recv(65536)
            except ConnectionError:
                received = b""
            if received:
                break
            self.close()
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, _, body = received.partition(b"\r\n\r\n")
        headers = head.lower()
        assert b" 200 " in headers.split(b"\r\n")[0], received
        _, stated, rest = headers.partition(b"content-length:")
        length = int(rest.split(b"\r\n")[0]) if stated else None
        while length is None or len(body) < length:
            chunk = self._more()
            if not chunk:
                break
            body += chunk
        if headers.startswith(b"http/1.0") or b"connection: close" in headers:
            self.close()
        return body

    def _more(self) -> bytes:
        assert self.socket is not None
        return self.socket.recv(65536)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def play(url: str, clients: int, rounds: int) -> tuple[float, list[float]]:
    """Rounds a second of so many clients at once, and the seconds of each request."""
    agents = [Client(url) for _ in range(clients)]

    def agent(client: Client) -> None:
        client.seconds.clear()
        for number in range(rounds):
            client.play_round(number)

    threads = [threading.Thread(target=agent, args=(client,)) for client in agents]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed = time.perf_counter() - start
    for client in agents:
        client.close()
    return clients * rounds / passed, [second for client in agents for second in client.seconds]


def compare(servers: dict[str, tuple[str, int | None]], rounds: int) -> None:
    """CPU time of a round, in turns; then rounds a second and slow requests."""
    for url, _ in servers.values():
        play(url, 1, 20)  # reads the test, warms up
    costs: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(5):
        for name, (url, pid) in servers.items():
            if pid is not None:
                before = cpu_seconds(pid)
                play(url, 4, rounds // 4)
                costs[name].append((cpu_seconds(pid) - before) / (rounds // 4 * 4))
    print(f"rounds of {SIZE} instances, {COLUMNS} columns" + "".join(f"{n:>12}" for n in servers))
    table = {
        "server CPU of a round, ms": [
            1e3 * statistics.median(c) if c else 0 for c in costs.values()
        ]
    }
    for clients in (1, 8, 50):
        played = max(rounds // clients, 4)
        table[f"rounds a second, {clients} clients"] = [
            play(url, clients, played)[0] for url, _ in servers.values()
        ]
    for url, _ in servers.values():
        seconds = sorted(play(url, 200, 3)[1])
        table.setdefault("p99 of a request, 200 clients, ms", []).append(
            1e3 * seconds[int(0.99 * len(seconds))]
        )
    for what, values in table.items():
        ratio = f"{values[0] / values[1]:11.2f}x" if len(values) > 1 and values[1] else ""
        print(f"{what:<37}" + "".join(f"{value:12.2f}" for value in values) + ratio)


def late_rounds(url: str) -> None:
    """Whether posting costs more as a test grows."""
    client = Client(url)
    seconds = []
    for number in range(ROUNDS):
        client.seconds.clear()
        client.play_round(number)
        seconds.append(sum(client.seconds[1:]))
    client.close()
    first, last = statistics.median(seconds[:50]), statistics.median(seconds[-50:])
    print(f"posting rounds 1 to 50, ms {1e3 * first:23.2f}")
    print(f"posting rounds {ROUNDS - 49} to {ROUNDS}, ms {1e3 * last:16.2f} {last / first:22.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="address of another server with the same tests")
    parser.add_argument("--against-pid", type=int, help="its process")
    parser.add_argument("--data", type=Path, help="folder to write the tests to, then stop")
    parser.add_argument("--rounds", type=int, default=400, help="rounds of each measurement")
    parsed = parser.parse_args()
    if parsed.data:
        write_data(parsed.data)
        return
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name) / "data")
        with server(Path(name) / "data", Path(name) / "state") as (url, pid):
            servers: dict[str, tuple[str, int | None]] = {"ours": (url, pid)}
            if parsed.against:
                servers["other"] = (parsed.against, parsed.against_pid)
            compare(servers, parsed.rounds)
            late_rounds(url)


if __name__ == "__main__":
    main()
