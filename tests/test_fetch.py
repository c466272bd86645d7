"""Downloads against a server that drops, ignores, changes and lies; and a kill -9 in the middle."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.cli import main
from schemas.errors import ConfigError, SourceError
from storage.filehash import HashCache
from tasks.operations import fetch as fetching
from tasks.operations.fetch import Remote, fetch
from tests.loopback import Loopback, Resource

BODY = bytes(range(256)) * 4096
OTHER = BODY[::-1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(fetching, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server():
    with Loopback() as loopback:
        yield loopback


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def remote(server: Loopback, body: bytes = BODY, name: str = "a.zip") -> Remote:
    return Remote(server.url(name), sha(body), len(body))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"a.zip.lock"}


def test_a_good_file_is_fetched_once(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY)
    path = fetch(remote(server), tmp_path / "new")
    assert path == tmp_path / "new" / "a.zip" and path.read_bytes() == BODY
    assert names(path.parent) == {"a.zip"}
    assert fetch(remote(server), tmp_path / "new") == path
    assert len(server.requests) == 1


def test_an_empty_file_and_a_chunked_one(server, tmp_path):
    server.resources["a.zip"] = Resource(b"")
    server.resources["b.zip"] = Resource(BODY, chunked=True)
    assert fetch(remote(server, b""), tmp_path).read_bytes() == b""
    assert fetch(remote(server, name="b.zip"), tmp_path).read_bytes() == BODY


def test_a_dropped_connection_is_resumed_not_repeated(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, drops=[400_000, 300_000])
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert [request.range for request in server.requests] == [
        None,
        "bytes=400000-",
        "bytes=700000-",
    ]
    assert {request.if_range for request in server.requests[1:]} == {'"1"'}
    assert server.sent == len(BODY)


def test_a_dropped_chunked_body_is_resumed(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, drops=[400_000], chunked=True)
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert server.requests[1].range is not None


def test_a_server_that_ignores_range_starts_again(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, drops=[400_000], ranges=False)
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert server.sent == 400_000 + len(BODY)


def test_a_partial_answer_that_begins_elsewhere_is_not_used(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, drops=[400_000], range_shift=-7)
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert [request.range for request in server.requests] == [None, "bytes=400000-", None]


@pytest.mark.parametrize("checks_if_range", [True, False])
@pytest.mark.parametrize("by_date", [False, True])
def test_content_that_changed_between_tries_is_not_mixed(
    server, tmp_path, by_date, checks_if_range
):
    def version(body: bytes, number: int, drops: list[int]) -> Resource:
        if by_date:
            date = f"Mon, 0{number} Jan 2024 00:00:00 GMT"
            marks = {"etag": None, "last_modified": date}
        else:
            marks = {"etag": f'"{number}"'}
        return Resource(body, drops=drops, checks_if_range=checks_if_range, **marks)

    asked = Remote(server.url("a.zip"))
    server.resources["a.zip"] = version(BODY, 1, [400_000])
    with pytest.raises(SourceError, match="400000 bytes are kept"):
        fetch(asked, tmp_path, retries=0)
    server.resources["a.zip"] = version(OTHER, 2, [])
    assert fetch(asked, tmp_path).read_bytes() == OTHER


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_without_a_strong_validator_only_a_hash_allows_to_resume(server, tmp_path, etag):
    for known, ranges in ((remote(server), [None, "bytes=1000-"]), (None, [None, None])):
        server.requests.clear()
        server.resources["a.zip"] = Resource(BODY, etag=etag, drops=[1000])
        into = tmp_path / str(known is None)
        assert fetch(known or Remote(server.url("a.zip")), into).read_bytes() == BODY
        assert [request.range for request in server.requests] == ranges


def test_a_wrong_hash_is_set_aside_and_named(server, tmp_path):
    server.resources["a.zip"] = Resource(OTHER)
    with pytest.raises(SourceError, match=f"found sha256 {sha(OTHER)}, expected {sha(BODY)}"):
        fetch(remote(server), tmp_path)
    assert names(tmp_path) == {"a.zip.bad"}
    server.resources["a.zip"] = Resource(BODY)
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert server.requests[-1].range is None


def test_a_web_page_in_place_of_the_file_is_called_so(server, tmp_path):
    server.resources["a.zip"] = Resource(b"<!doctype html><p>please log in")
    with pytest.raises(SourceError, match="looks like a web page"):
        fetch(Remote(server.url("a.zip"), sha(BODY)), tmp_path)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_size_that_differs_is_refused_before_the_body(server, tmp_path, difference):
    server.resources["a.zip"] = Resource(BODY)
    asked = Remote(server.url("a.zip"), None, len(BODY) + difference)
    with pytest.raises(SourceError, match=f"announces {len(BODY)} bytes, expected"):
        fetch(asked, tmp_path)
    assert names(tmp_path) == set()


def test_a_body_longer_than_the_size_is_never_written(server, tmp_path, monkeypatch):
    server.resources["a.zip"] = Resource(BODY, chunked=True)
    seen = []
    with pytest.raises(SourceError, match="sends more bytes, expected 1000"):
        fetch(Remote(server.url("a.zip"), None, 1000), tmp_path, progress=lambda *p: seen.append(p))
    assert max(done for _, done, _ in seen) <= 1000
    assert (tmp_path / "a.zip.part").stat().st_size == 0
    monkeypatch.setattr(fetching, "UNKNOWN_SIZE_LIMIT", 1000)
    with pytest.raises(SourceError, match="sends more bytes, expected at most 1000"):
        fetch(Remote(server.url("a.zip")), tmp_path)


def test_a_length_that_promises_too_much_is_not_believed(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, length=len(BODY) + 5)
    with pytest.raises(SourceError, match=f"ended after {len(BODY)} of {len(BODY) + 5} bytes"):
        fetch(Remote(server.url("a.zip")), tmp_path, retries=0)
    assert "a.zip" not in names(tmp_path)


def test_a_length_that_promises_too_little_is_caught_by_the_hash(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, length=1000)
    with pytest.raises(SourceError, match="found sha256"):
        fetch(Remote(server.url("a.zip"), sha(BODY)), tmp_path)


def test_503_is_tried_again_404_is_not(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, statuses=[503, 500])
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert len(server.requests) == 3
    with pytest.raises(SourceError, match="404"):
        fetch(Remote(server.url("nowhere.zip")), tmp_path)
    assert len(server.requests) == 4


def test_tries_end_and_wait_longer_each_time(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    server.resources["a.zip"] = Resource(BODY, statuses=[503] * 99)
    with pytest.raises(SourceError, match=r"503.*given up after 4 tries"):
        fetch(remote(server), tmp_path, retries=3)
    assert waits == [0.001, 0.002, 0.004]
    assert len(server.requests) == 4


def test_nobody_listening(tmp_path):
    with pytest.raises(SourceError, match=r"connection failed.*refused"):
        fetch(Remote("http://127.0.0.1:1/a.zip"), tmp_path, retries=1)


def test_a_silent_server_times_out(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT_SECONDS", 0.2)
    server.resources["a.zip"] = Resource(BODY, block_seconds=1.0)
    start = time.monotonic()
    with pytest.raises(SourceError, match="timed out"):
        fetch(remote(server), tmp_path, retries=0)
    assert time.monotonic() - start < 5


def test_a_part_that_is_longer_than_the_file_is_thrown_away(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, drops=[500_000])
    with pytest.raises(SourceError):
        fetch(Remote(server.url("a.zip")), tmp_path, retries=0)
    server.resources["a.zip"] = Resource(BODY[:1000])
    path = fetch(Remote(server.url("a.zip"), sha(BODY[:1000])), tmp_path)
    assert path.read_bytes() == BODY[:1000]
    assert [request.range for request in server.requests] == [None, "bytes=500000-", None]


def test_a_part_of_another_url_is_not_continued(server, tmp_path):
    server.resources["v1/a.zip"] = Resource(BODY, drops=[1000])
    with pytest.raises(SourceError):
        fetch(Remote(server.url("v1/a.zip")), tmp_path, retries=0)
    server.resources["v2/a.zip"] = Resource(OTHER)
    assert fetch(Remote(server.url("v2/a.zip"), sha(OTHER)), tmp_path).read_bytes() == OTHER
    assert server.requests[-1].range is None


def test_a_whole_part_needs_no_request(server, tmp_path):
    (tmp_path / "a.zip.part").write_bytes(BODY)
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert server.requests == []


def test_a_whole_part_of_unknown_origin_needs_a_hash(server, tmp_path):
    (tmp_path / "a.zip.part").write_bytes(OTHER)
    server.resources["a.zip"] = Resource(BODY)
    asked = Remote(server.url("a.zip"), None, len(BODY))
    assert fetch(asked, tmp_path).read_bytes() == BODY


def test_a_damaged_file_of_that_name_is_set_aside_and_fetched_again(server, tmp_path):
    (tmp_path / "a.zip").write_bytes(OTHER)
    server.resources["a.zip"] = Resource(BODY)
    assert fetch(remote(server), tmp_path).read_bytes() == BODY
    assert (tmp_path / "a.zip.bad").read_bytes() == OTHER


def test_the_hash_cache_spares_reading_a_good_file_again(server, tmp_path, monkeypatch):
    server.resources["a.zip"] = Resource(BODY)
    cache = HashCache(tmp_path / "hashes.sqlite")
    path = fetch(remote(server), tmp_path)
    os.utime(path, (1, 1))
    assert fetch(remote(server), tmp_path, cache=cache) == path
    monkeypatch.setattr("storage.filehash._hash", lambda path: pytest.fail("read again"))
    assert fetch(remote(server), tmp_path, cache=cache) == path


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_a_local_file_is_checked_where_it_lies(tmp_path, form):
    source = tmp_path / "with space.zip"
    source.write_bytes(BODY)
    url = form.format(source) if form == "{}" else form.format(source).replace(" ", "%20")
    assert fetch(Remote(url, sha(BODY), len(BODY)), tmp_path / "into") == source
    with pytest.raises(SourceError, match=f"found sha256 {sha(BODY)}, expected {sha(OTHER)}"):
        fetch(Remote(url, sha(OTHER)), tmp_path / "into")
    with pytest.raises(SourceError, match=f"found {len(BODY)} bytes, expected 3"):
        fetch(Remote(url, None, 3), tmp_path / "into")
    assert source.read_bytes() == BODY and not (tmp_path / "into").exists()


def test_local_files_that_are_not_there(tmp_path):
    with pytest.raises(SourceError, match="is not a file"):
        fetch(Remote(str(tmp_path / "none.zip")), tmp_path)
    with pytest.raises(SourceError, match="is not a file"):
        fetch(Remote(str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fetch(Remote("ftp://host/a.zip"), Path("x")),
        lambda: fetch(Remote("file://host/a.zip"), Path("x")),
        lambda: fetch(Remote("https://host/?id=3"), Path("x")),
        lambda: fetch(Remote("https://host/%2e%2e"), Path("x")),
        lambda: fetch(Remote("https://host/a", name="../a"), Path("x")),
        lambda: Remote("https://host/a", sha256="ABC"),
        lambda: Remote("https://host/a", size=-1),
    ],
)
def test_descriptions_that_cannot_be_right(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        make()
    assert list(tmp_path.iterdir()) == []


def test_plain_lines_off_a_terminal_and_a_bar_on_one(server, tmp_path, monkeypatch, capsys):
    server.resources["a.zip"] = Resource(BODY)
    fetch(remote(server), tmp_path / "1")
    assert capsys.readouterr().err == f"a.zip: {len(BODY)}/{len(BODY)} bytes\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch(remote(server), tmp_path / "2")
    assert "1.0/1.0 MB" in capsys.readouterr().err


CHILD = """
import sys
from pathlib import Path
from tasks.operations.fetch import Remote, fetch
fetch(Remote(sys.argv[1], sys.argv[2], int(sys.argv[3])), Path(sys.argv[4]))
"""


def start(server: Loopback, body: bytes, into: Path) -> subprocess.Popen:
    arguments = [server.url("a.zip"), sha(body), str(len(body)), str(into)]
    root = Path(__file__).parents[1]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], cwd=root)


def test_kill_9_in_the_middle_then_again_resumes(server, tmp_path):
    body = BODY * 4
    server.resources["a.zip"] = Resource(body, block_seconds=0.02)
    part = tmp_path / "a.zip.part"
    child = start(server, body, tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size >= 1 << 20):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    kept = part.stat().st_size
    assert 1 << 20 <= kept < len(body) and not (tmp_path / "a.zip").exists()
    server.resources["a.zip"].block_seconds = 0
    assert fetch(remote(server, body), tmp_path).read_bytes() == body
    assert server.requests[-1].range == f"bytes={kept}-"
    assert names(tmp_path) == {"a.zip"}


def test_two_processes_at_once_make_one_download(server, tmp_path):
    server.resources["a.zip"] = Resource(BODY, block_seconds=0.05)
    children = [start(server, BODY, tmp_path) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert len(server.requests) == 1


def test_the_command(server, tmp_path, capsys):
    server.resources["a.zip"] = Resource(BODY)
    words = ["fetch", server.url("a.zip"), "--out", str(tmp_path)]
    assert main([*words, "--sha256", sha(BODY)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.zip")
    assert main([*words, "--sha256", sha(OTHER)]) == 2
    assert "expected" in capsys.readouterr().err
