"""Running the server: a data directory and a state directory in, a listening socket out.

Everything that the server remembers is one file below the state directory, which no second server
opens meanwhile: what an owner may do is decided by one policy and one process. It listens on this
machine only, unless tokens are given; then the policy is `evaluation`.
"""

import contextlib
import ipaddress
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from schemas.errors import ConfigError
from storage.locks import locked
from tasks.condda.commands import EVALUATION, PUBLISHED, Caller, Limits, Policy, Role
from tasks.condda.harness import Harness
from tasks.condda.retention import check_days, retire_daily
from tasks.condda.store import EVENTS, EventStore
from tasks.condda.telling import warn_of_telling_names
from tasks.condda.test_files import TestLibrary

PORT = 3307
_TOKEN_LENGTH = 16
_WRITE_TOKENS = "write a line for each: agent or operator, the owner's name, the token"
# A request's line and headers: ids for feedback come in the query.
_HEAD_BYTES = 4 * 1024 * 1024
_START_SECONDS = 30.0
_BACKLOG = 2048


def make_harness(
    tests: Path, state: Path, policy: Policy = PUBLISHED, *, limits: Limits | None = None
) -> Harness:
    """A harness over the tests in one folder, with its store in another, made if need be."""
    library = TestLibrary(tests)
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the state folder {state}: {error.strerror}") from error
    return Harness(library, EventStore(state / EVENTS), policy, limits=limits)


@dataclass(frozen=True)
class Token:
    """What a client shows, and who it then is."""

    text: str
    caller: Caller


def read_tokens(path: Path) -> list[Token]:
    """Tokens from a file of lines such as `agent alice <token>` or `operator bob <token>`.

    Empty lines, and those that begin with #, are passed over. An owner has one role, maybe several
    tokens; a token has one owner.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, ValueError) else error.strerror
        raise ConfigError(f"cannot read the tokens in {path}: {reason}") from error
    tokens: dict[str, Token] = {}
    roles: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[0] not in get_args(Role):
            raise ConfigError(f"line {number} of {path} is no token; {_WRITE_TOKENS}")
        role, owner, text = words
        if text in tokens:
            raise ConfigError(
                f"line {number} of {path} has a token of an earlier line; make another"
            )
        if roles.setdefault(owner, role) != role:
            raise ConfigError(
                f"{owner} is agent and operator in {path}; give one of them another name"
            )
        tokens[text] = Token(text, Caller(owner, cast(Role, role)))
    if not tokens:
        raise ConfigError(f"there is no token in {path}; {_WRITE_TOKENS}")
    return list(tokens.values())


def check_access(host: str, tokens: Sequence[Token], policy: Policy | None = None) -> Policy:
    """The policy to serve by: as published only on this machine and without tokens.

    Other machines need tokens, and tokens must be hard to guess.
    """
    for token in tokens:
        text = token.text
        if len(text) < _TOKEN_LENGTH or not (text.isascii() and text.isprintable()):
            raise ConfigError(
                f"a token has {len(text)} characters, expected at least {_TOKEN_LENGTH} of plain "
                "ASCII; make one with: python -c 'import secrets; print(secrets.token_hex())'"
            )
    policy = policy or (EVALUATION if tokens else PUBLISHED)
    if tokens and not policy.strict:
        raise ConfigError(
            "the policy published tells agents ground truth, so it is for this machine and without "
            "tokens; serve by the policy evaluation"
        )
    if not tokens and not _is_loopback(host):
        raise ConfigError(
            f"without tokens the server listens on 127.0.0.1 only, not on {host!r}; give tokens"
        )
    return policy


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    tests: Path,
    state: Path,
    host: str = "127.0.0.1",
    port: int = PORT,
    policy: Policy | None = None,
    tokens: Sequence[Token] = (),
    *,
    limits: Limits | None = None,
    retain_days: float | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Port 0 takes any free one; the URL is printed.

    Sessions that ended more than `retain_days` ago are retired at the start and every day.
    """
    if retain_days is not None:
        check_days(retain_days)
    stopped = threading.Event()
    with _ready(tests, state, host, port, policy, tokens, limits) as (server, harness, listening):
        try:
            print(f"serving {tests} at {url_of(listening)} ({harness.policy.name})", flush=True)
            if harness.policy.strict:
                warn_of_telling_names(tests)
            if not harness.library.has_tests():
                print(f"{tests} holds no OND/<domain>/<test>_single_df.csv so far", flush=True)
            if retain_days is not None:
                retire_daily(state, retain_days, stopped)
            with _exit_on_sigterm():
                server.run(sockets=[listening])
        finally:
            stopped.set()


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM as an exception: uvicorn raises it again at its end, and the store must close."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)) if in_main else None
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def running(tests: Path, state: Path, **options: Any) -> Iterator[str]:
    """The same in a thread of this process, for the time of a with block; gives the URL."""
    with _ready(tests, state, **options) as (server, _, listening):
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="condda server", daemon=True
        )
        thread.start()
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise ConfigError("the server did not start; see its log")
                time.sleep(0.005)
            yield url_of(listening)
        finally:
            server.should_exit = True
            thread.join()


def url_of(listening: socket.socket) -> str:
    """URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        about = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, address = about[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        # From here on the system holds connections until the server takes them.
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listening


@contextlib.contextmanager
def _ready(
    tests: Path,
    state: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    policy: Policy | None = None,
    tokens: Sequence[Token] = (),
    limits: Limits | None = None,
) -> Iterator[tuple[Any, Harness, socket.socket]]:
    """A server that can run, its harness and its socket; both are closed at the end."""
    import uvicorn

    from tasks.condda.server.app import make_app
    from tasks.condda.server.connection import Connection

    policy = check_access(host, tokens, policy)
    with contextlib.closing(_listen(host, port)) as listening:
        harness = make_harness(tests, state, policy, limits=limits)
        busy, cure = f"{state} is served", "stop it, or name another state folder"
        with contextlib.closing(harness.store), locked(state, "server", busy=busy, cure=cure):
            config = uvicorn.Config(
                make_app(harness, tokens=tokens),
                http=Connection,
                proxy_headers=False,
                ws="none",
                lifespan="off",
                access_log=False,
                log_level="warning",
                server_header=False,
                h11_max_incomplete_event_size=_HEAD_BYTES,
                timeout_graceful_shutdown=5,
            )
            yield uvicorn.Server(config), harness, listening
