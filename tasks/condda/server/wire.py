"""The published REST API: requests of the sail-on client in, the public server's answers out.

CONDDA rule 9 (endpoints, parts, content types). `read_sent` takes a request apart: a body in parts,
a form or JSON, and a query become checked texts, lists and objects. A handler gets what a request
carries and calls one method of the harness.
"""

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Response
from urllib3.filepost import encode_multipart_formdata
from werkzeug.exceptions import HTTPException
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

from tasks.condda import commands
from tasks.condda.harness import Harness
from tasks.condda.lookup import check_text, check_texts
from tasks.condda.rules import Status, refused
from tasks.condda.test_files import CELL_EDGES

# Literally so on the public server, whatever the encoding of the body.
DATASET_TYPE = "Content-Type: text/csv; charset=utf-16"
_DEFAULT_DOMAIN = "image_classification"
_MOST_PARTS = 100
_PLAIN_MULTIPART = re.compile(r"multipart/form-data; boundary=([0-9A-Za-z_-]{1,70})")
_PLAIN_PART = re.compile(
    rb'\r\nContent-Disposition: form-data; name="([\w.-]+)"(?:; filename="[\w.-]*")?\r\n'
    rb"(?:Content-Type: [0-9A-Za-z/+.-]+\r\n)?\r\n"
)


Handler = Callable[[Harness, "Sent"], Response]


@dataclass(frozen=True)
class Sent:
    """What a request carries. An item is looked up in parts, then query, then JSON body."""

    parts: Mapping[str, bytes]
    query: Mapping[str, str]
    document: Mapping[str, Any]

    def find(self, name: str) -> Any:
        """Bytes of a part, text of a query parameter, or any JSON; None if there is none."""
        if name in self.parts:
            return self.parts[name]
        return self.query.get(name, self.document.get(name))

    def text(self, name: str) -> str | None:
        """The same as text."""
        found = self.find(name)
        if isinstance(found, bytes):
            try:
                return found.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise refused("UnicodeDecodeError", f"{name} is not UTF-8 text") from error
        return None if found is None else check_text(found, name)

    def settings(self, name: str, invalid: Status = 400) -> dict[str, Any] | None:
        """The same as a JSON object; `invalid` is the status if it is none."""
        found = self.find(name)
        if isinstance(found, Mapping):
            return dict(found)
        content = self.text(name)
        return None if content is None else json_object(content, name, invalid)

    def need(self, *names: str) -> list[str]:
        """Query parameters that must be there."""
        return list(needed(self.query, *names).values())


def read_sent(content_type: str, query: Mapping[str, str], body: bytes) -> Sent:
    """Take a request's body apart as its content type says."""
    plain = _PLAIN_MULTIPART.fullmatch(content_type)
    if plain and (parts := _plain_parts(body, plain[1].encode())) is not None:
        return Sent(parts, query, {})
    kind, options = parse_options_header(content_type)
    if kind == "multipart/form-data":
        return Sent(_parts(body, options.get("boundary", "")), query, {})
    if kind == "application/x-www-form-urlencoded":
        pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
        return Sent({name: value.encode() for name, value in pairs}, query, {})
    if kind == "application/json" and body:
        return Sent({}, query, json_object(body, "the body"))
    return Sent({}, query, {})


def _plain_parts(body: bytes, boundary: bytes) -> dict[str, bytes] | None:
    """Parts as clients send them, a name and maybe a filename; None for any other body."""
    first, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if first or len(pieces) > _MOST_PARTS or pieces[-1:] not in ([b"--"], [b"--\r\n"]):
        return None
    if body.count(b"--" + boundary) != len(pieces):
        return None  # a boundary after another line end
    parts: dict[str, bytes] = {}
    for piece in pieces[:-1]:
        head = _PLAIN_PART.match(piece)
        if head is None:
            return None
        parts.setdefault(head[1].decode(), piece[head.end() :])
    return parts


def _parts(body: bytes, boundary: str) -> dict[str, bytes]:
    """Parts by name, the first one of each; whether a part has a filename does not matter."""
    parts: dict[str, bytes] = {}
    name, chunks = "", io.BytesIO()
    try:
        decoder = MultipartDecoder(boundary.encode("ascii"), max_parts=_MOST_PARTS)
        decoder.receive_data(body)
        decoder.receive_data(None)
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, Field | File):
                name, chunks = event.name, io.BytesIO()
            elif isinstance(event, Data):
                chunks.write(event.data)
                if not event.more_data:
                    parts.setdefault(name, chunks.getvalue())
    except (ValueError, KeyError, HTTPException) as error:
        raise refused("InvalidMultipart", "the body is not multipart/form-data") from error
    return parts


def json_object(content: str | bytes, name: str, invalid: Status = 400) -> dict[str, Any]:
    """A JSON object out of text."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise refused("JSONDecodeError", f"{name} is not JSON", invalid) from error
    if not isinstance(found, dict):
        raise refused("InvalidParams", f"{name} is no JSON object")
    return found


def needed(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those values, all of which must be there."""
    lacking = [name for name in names if name not in values]
    if lacking:
        raise refused("MissingParamsError", f"the request lacks {', '.join(lacking)}")
    return {name: values[name] for name in names}


def json_response(content: Any, status: int = 200) -> Response:
    """JSON in the public server's form: sorted, without blanks, with a line end."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"
    return Response(text, status, media_type="application/json")


def _csv(body: bytes) -> Response:
    return Response(body, media_type="text/csv; charset=utf-8")


def _page(text: str) -> Response:
    return Response(text, media_type="text/html; charset=utf-8")


def list_tests(harness: Harness, sent: Sent) -> Response:
    """GET /test/ids."""
    wanted = sent.settings("test_requirements")
    if wanted is None:
        protocol = sent.text("protocol")
        if protocol is None:
            raise refused("MissingRequestValue", "test_requirements or protocol is missing")
        domain = sent.text("domain")
        wanted = {"protocol": protocol, "domain": _DEFAULT_DOMAIN if domain is None else domain}
    else:
        needed(wanted, "protocol", "domain", "detector_seed")
    return _csv(harness.test_ids_request(protocol=wanted["protocol"], domain=wanted["domain"]))


def open_session(harness: Harness, sent: Sent) -> Response:
    """POST /session."""
    settings = sent.settings("configuration", invalid=500) or {}
    named = needed(settings, "protocol", "novelty_detector_version", "detection_threshold")
    if "test_ids" in settings:
        tests = settings["test_ids"]
    else:
        listed = sent.text("test_ids")
        if listed is None:
            raise refused("MissingParamsError", "the request lacks test_ids")
        tests = [line.strip(CELL_EDGES + ",\r\t") for line in listed.split("\n") if line.strip()]
    session = harness.session_request(
        test_ids=tests,
        domain=settings.get("domain", _DEFAULT_DOMAIN),
        hints=settings.get("hints", []),
        **named,
    )
    return json_response({"session_id": session})


def _by_query(answered: Callable[[Any], Response], command: Any, *names: str) -> Handler:
    """A call whose command is made of the query."""

    def handler(harness: Harness, sent: Sent) -> Response:
        session, *values = sent.need("session_id", *names)
        return answered(harness.run(session, command(*values)))

    return handler


def _dataset(body: bytes) -> Response:
    return Response(body, headers={"content-type": DATASET_TYPE})


def _done(_: None) -> Response:
    return _page("OK")


def results(harness: Harness, sent: Sent) -> Response:
    """POST /session/results."""
    about = sent.settings("test_identification") or {}
    types = needed(about, "result_types")["result_types"]
    _post(harness, sent, about, check_text(types, "result_types").split("|"))
    return _page("OK")


def _post(harness: Harness, sent: Sent, about: dict[str, Any], types: Sequence[str]) -> None:
    place = needed(about, "session_id", "test_id", "round_id")
    files = {}
    for kind in types:
        body = sent.find(f"{kind}_file")
        if body is None:
            raise refused("MissingParamsError", f"the request lacks the file {kind[:80]}_file")
        files[kind] = body if isinstance(body, bytes) else check_text(body, kind).encode()
    harness.post_results(result_files=files, **place)


def feedback(harness: Harness, sent: Sent) -> Response:
    """GET /session/feedback."""
    session, test, types = sent.need("session_id", "test_id", "feedback_type")
    ids = sent.query.get("feedback_ids", "")
    number = sent.query.get("round_id", "last")
    if not harness.policy.strict and not number.isdecimal():
        number = "last"  # the public server only puts it into a file's name
    about = {"feedback_ids": ids.split("|") if ids else None, "round_id": number}
    return _feedback(harness, session, test, types.split("|"), about)


def results_feedback(harness: Harness, sent: Sent) -> Response:
    """POST /session/resultsfeedback: types and ids are JSON lists here."""
    about = sent.settings("test_identification") or {}
    needed(about, "session_id", "test_id", "round_id", "result_types")
    kinds = check_texts(about.get("feedback_types", []), "feedback_types")
    ids = about.get("feedback_ids")
    ids = None if ids is None else check_texts(ids, "feedback_ids")
    types = check_texts(about["result_types"], "result_types")
    if not types:
        raise refused("MissingParamsError", "the request names no result type")
    _post(harness, sent, about, types)
    if not kinds:
        return _csv(b"")
    asked = {"feedback_ids": ids, "round_id": "last"}
    return _feedback(
        harness, about["session_id"], about["test_id"], kinds, asked, about["round_id"]
    )


def _feedback(
    harness: Harness,
    session: str,
    test: str,
    kinds: Sequence[str],
    asked: dict[str, Any],
    number: Any = None,
) -> Response:
    """Lines of one type as CSV; of several as multipart, one part each (docs/condda.md, rule 9)."""
    told = {
        kind: harness.get_feedback_request(
            feedback_type=kind, test_id=test, session_id=session, **asked
        )
        for kind in kinds
    }
    if len(kinds) == 1:
        return _csv(told[kinds[0]])
    name = asked["round_id"] if number is None else number
    # What the harness took for a number is one; only then may it stand in a header.
    name = "last" if name in ("", "last") else int(name)
    body, content_type = encode_multipart_formdata(
        {
            kind: (f"{session}.{test}.{name}_{kind}.csv", lines, "text/csv")
            for kind, lines in told.items()
        }
    )
    return Response(body, headers={"content-type": content_type})


def evaluations(harness: Harness, sent: Sent) -> Response:
    """GET /session/evaluations; `baseline_session_id` is ours and adds m_nrp.

    Published: devmode evaluates a test that goes on, so it tells about ground truth; not if strict.
    """
    session, test = sent.need("session_id", "test_id")
    metrics = harness.evaluate(
        test_id=test,
        session_id=session,
        baseline_session_id=sent.query.get("baseline_session_id"),
        devmode=not harness.policy.strict and _is_true(sent.query.get("devmode", "")),
    )
    return json_response(metrics)


def status(harness: Harness, sent: Sent) -> Response:
    """GET /session/status."""
    tests, of = sent.query.get("test_ids"), sent.query.get
    lines = harness.session_status(
        after=of("after"),
        session_id=of("session_id"),
        test_ids=tests.split("|") if tests else None,
        detector=of("detector"),
        include_tests=_is_true(of("include_tests", "")),
    )
    return _page(lines)


def archive(harness: Harness, sent: Sent) -> Response:
    """GET /session/zip."""
    [session] = sent.need("session_id")
    tests = sent.query.get("test_id")
    content = harness.session_zip(session_id=session, test_ids=tests.split("|") if tests else None)
    # The session exists, so its id is a name without quotes or line ends.
    headers = {"content-disposition": f'attachment; filename="{session}.zip"'}
    return Response(content, headers=headers, media_type="application/zip")


def _is_true(value: str) -> bool:
    return value.lower() not in ("", "0", "false")


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/test/ids", list_tests),
    ("GET", "/test/metadata", _by_query(json_response, commands.Metadata, "test_id")),
    ("DELETE", "/test", _by_query(_done, commands.CompleteTest, "test_id")),
    ("POST", "/session", open_session),
    ("DELETE", "/session", _by_query(_done, commands.Terminate)),
    ("GET", "/session/latest", _by_query(json_response, commands.Latest)),
    ("GET", "/session/dataset", _by_query(_dataset, commands.Dataset, "test_id", "round_id")),
    ("POST", "/session/results", results),
    ("GET", "/session/feedback", feedback),
    ("POST", "/session/resultsfeedback", results_feedback),
    ("GET", "/session/evaluations", evaluations),
    ("GET", "/session/status", status),
    ("GET", "/session/zip", archive),
)
