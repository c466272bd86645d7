"""What a wire request carries: a body in parts, a form or JSON, and a query (CONDDA rule 9).

Here bytes from outside become checked texts, lists and objects; what is wrong is refused.
`public_message` is what a refusal says to the outside.
"""

import io
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from werkzeug.exceptions import HTTPException
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

from tasks.condda.rules import ProtocolRefusal

_MOST_PARTS = 100
_log = logging.getLogger(__name__)


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

    def settings(self, name: str, invalid: int = 400) -> dict[str, Any] | None:
        """The same as a JSON object; `invalid` is the status if it is none."""
        found = self.find(name)
        if isinstance(found, Mapping):
            return dict(found)
        content = self.text(name)
        return None if content is None else json_object(content, name, invalid)

    def need(self, *names: str) -> list[str]:
        """Query parameters that must be there."""
        return [check_text(value, name) for name, value in needed(self.query, *names).items()]


def read_sent(content_type: str, query: Mapping[str, str], body: bytes) -> Sent:
    """Take a request's body apart as its content type says."""
    kind, options = parse_options_header(content_type)
    if kind == "multipart/form-data":
        return Sent(_parts(body, options.get("boundary", "")), query, {})
    if kind == "application/x-www-form-urlencoded":
        pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
        return Sent({name: value.encode() for name, value in pairs}, query, {})
    if kind == "application/json" and body:
        return Sent({}, query, json_object(body, "the body"))
    return Sent({}, query, {})


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


def json_object(content: str | bytes, name: str, invalid: int = 400) -> dict[str, Any]:
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


def check_text(value: object, name: str) -> str:
    """A text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise refused("InvalidParams", f"{name} must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused("InvalidParams", f"{name} holds half a surrogate pair") from error
    return value


def check_texts(values: object, name: str) -> list[str]:
    """A list of such texts."""
    if not isinstance(values, list):
        raise refused("InvalidParams", f"{name} must be a list")
    return [check_text(value, name) for value in values]


def check_threshold(value: object) -> Any:
    """A number that is not too large to be one; the harness checks the rest."""
    if isinstance(value, int) and abs(value) > 1e9:
        raise refused("InvalidThreshold", "detection_threshold is no probability")
    return value


def refused(reason: str, message: str, status: int = 400) -> ProtocolRefusal:
    return ProtocolRefusal(status, reason, message)  # type: ignore[arg-type]


def public_message(refusal: ProtocolRefusal) -> str:
    """What a client is told: not what is wrong with a file, which may be ground truth."""
    if refusal.reason not in ("SourceError", "LakeError"):
        return refusal.message
    _log.error("%s", refusal.message)
    return "a file of the server cannot be read or written; its log says which one and why"
