"""Pictures and clouds of generated tests: what is in the files, and who gets them when."""

import io
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest

from schemas.condda import TestSettings
from schemas.config import make_config
from schemas.errors import ConfigError
from tasks.condda.commands import Caller, ProtocolRefusal
from tasks.condda.from_lake import tests_of_lake as write_tests
from tasks.condda.harness import Harness
from tasks.condda.media import LIFETIME, MediaLinks
from tasks.condda.server.serve import Token, running
from tasks.condda.store import EventStore
from tasks.condda.test_files import TestFile, TestLibrary
from tests.condda.test_scenarios import put_lake
from tests.small_lake import put_table

SECRET = b"\x00comment: class d, novel"
ROUND = 8


def jpeg(number: int) -> bytes:
    """A picture of one colour with a comment that tells its class."""
    pixels = np.full((8, 8, 3), number % 256, np.uint8)
    data = cv2.imencode(".jpg", pixels)[1].tobytes()
    comment = b"\xff\xfe" + (len(SECRET) + 2).to_bytes(2, "big") + SECRET
    return data[:2] + comment + data[2:]


def put_pictures(lake: Path, benchmark: str) -> None:
    """The small lake, once more under another name, with a picture of each sample."""
    put_lake(lake, ("plain",), benchmark)
    names = [f"{name}{number:03d}" for name in "abcdefg" for number in range(100)]
    rows = [{"sample_id": name, "encoding": "jpeg"} for name in names]
    pictures = [row | {"data": jpeg(place)} for place, row in enumerate(rows)]
    put_table(lake, benchmark, "pictures", pictures)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TestFile]:
    root = tmp_path_factory.mktemp("media")
    put_pictures(root / "lake", "semantic")
    settings = TestSettings(tests=1, rows=40, round_size=ROUND, media=True, seed=1)
    frame = write_tests(root / "lake", "semantic", root / "tests", settings)
    return root / "tests", TestLibrary(root / "tests").load(
        frame["test_id"][0], "CONDDA", "novelty"
    )


def test_files_have_the_pixels_and_nothing_else(made: tuple[Path, TestFile]) -> None:
    root, test = made
    files = {path.stem: path for path in (root / "media" / test.test_id).iterdir()}
    assert set(files) == set(test.names) and len(files) == 40
    for name, sample in zip(test.names, test.truth["sample_id"], strict=True):
        data = files[name].read_bytes()
        assert SECRET not in data and sample.encode() not in data
        number = "abcdefg".index(sample[0]) * 100 + int(sample[1:])
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        assert pixels.shape == (8, 8, 3) and abs(int(pixels.mean()) - number % 256) <= 2


def opened(root: Path, folder: Path, test: TestFile) -> tuple[Harness, str]:
    harness = Harness(TestLibrary(root), EventStore(folder / "events.sqlite"))
    session = harness.session_request(
        test_ids=[test.test_id],
        protocol="CONDDA",
        domain="novelty",
        novelty_detector_version="a-1",
    )
    return harness, session


def test_links_are_of_what_was_served_in_order(made: tuple[Path, TestFile], tmp_path: Path) -> None:
    root, test = made
    harness, session = opened(root, tmp_path, test)
    now = [1000.0]
    media = MediaLinks(harness, b"key", lambda: now[0])
    assert media.links(session, test.test_id)["links"] == []
    harness.dataset_request(test_id=test.test_id, round_id=0, session_id=session)
    found = media.links(session, test.test_id)
    assert [link["instance_id"] for link in found["links"]] == list(test.names[:ROUND])
    name, expires = test.names[3], found["expires"]
    assert expires == 1000 + LIFETIME
    signature = found["links"][3]["path"].rpartition("=")[2]
    data, kind = media.read(session, test.test_id, name, expires, signature)
    assert kind == "image/png" and data.startswith(b"\x89PNG")
    later = test.names[ROUND]
    wrong = [
        (later, expires, signature, "LinkInvalid"),
        (name, expires + 1, signature, "LinkInvalid"),
        (name, expires, "0" * 64, "LinkInvalid"),
        # Signed, but not served.
        (later, expires, media._signature(session, test.test_id, later, expires), "not_found"),
    ]
    for instance, until, sign, reason in wrong:
        with pytest.raises(ProtocolRefusal) as refusal:
            media.read(session, test.test_id, instance, until, sign)
        assert refusal.value.reason.endswith(reason)
    with pytest.raises(ProtocolRefusal, match="was not given out here"):
        MediaLinks(harness, b"other").read(session, test.test_id, name, expires, signature)
    now[0] = expires + 1
    with pytest.raises(ProtocolRefusal, match="has expired"):
        media.read(session, test.test_id, name, expires, signature)
    now[0] = 1000
    harness.terminate_session(session_id=session)
    with pytest.raises(ProtocolRefusal, match="has ended"):
        media.read(session, test.test_id, name, expires, signature)


def test_over_http_an_agent_gets_its_own_only(made: tuple[Path, TestFile], tmp_path: Path) -> None:
    root, test = made
    keys = {name: f"a-token-that-is-long-enough-{name}" for name in ("alice", "bob")}
    tokens = [Token(key, Caller(name, "agent")) for name, key in keys.items()]
    with running(root, tmp_path / "state", tokens=tokens) as url:
        alice, bob = (
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, trust_env=False)
            for key in keys.values()
        )
        new = {"protocol": "CONDDA", "domain": "novelty", "detector": "a"}
        session = alice.post("/v1/sessions", json={**new, "test_ids": [test.test_id]}).json()
        place = f"/v1/sessions/{session['session_id']}/tests/{test.test_id}"
        lines = alice.get(f"{place}/rounds/0").json()["lines"]
        links = alice.get(f"{place}/media").json()["links"]
        assert [link["instance_id"] for link in links] == lines
        first = alice.get(links[0]["url"])
        assert first.status_code == 200 and first.headers["content-type"] == "image/png"
        assert first.content == (root / "media" / test.test_id / f"{lines[0]}.png").read_bytes()
        for client, path in (
            (bob, f"{place}/media"),
            (bob, links[0]["url"]),
            (alice, links[0]["url"].replace(lines[0], test.names[ROUND])),
            (alice, links[0]["url"].partition("?")[0]),
            (alice, f"{place}/media/..%2F..%2Fplan-CONDDA.1.json?expires=1&signature=a"),
        ):
            assert 400 <= client.get(path).status_code < 500, path


def test_clouds_are_arrays_and_what_has_no_media_is_said(tmp_path: Path) -> None:
    from tasks.condda.media import _cloud

    points = np.arange(12, dtype=np.float32)
    data = _cloud({"sample_id": "a", "points": points.tolist(), "count": 3})
    assert np.array_equal(np.load(io.BytesIO(data)), points.reshape(-1, 3)[:3])
    put_lake(tmp_path / "lake")
    with pytest.raises(ConfigError, match="no pictures or clouds of kowl"):
        write_tests(tmp_path / "lake", "kowl", tmp_path / "out", TestSettings(media=True))
    with pytest.raises(ConfigError, match="anonymous ids only"):
        make_config(TestSettings, {"media": True, "anonymous": False})
    assert not (tmp_path / "out").exists()
