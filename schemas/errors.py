"""Errors that a user can mend. The command line prints one as a sentence and exits with its code.

House form of a message: what failed, which record, what was found, what was expected, what to do.
Anything else that escapes is a defect of ours and keeps its traceback.
"""

import re

SECRET = re.compile(r"(?<=://)[^/@\s]*(?=@)")
"""User and password of a URL."""


class NoveltyError(Exception):
    """Base of every error that the user, not the programmer, can mend. Shows no password."""

    exit_code = 2

    def __str__(self) -> str:
        return SECRET.sub("…", super().__str__())


class ConfigError(NoveltyError):
    """A setting is unknown, missing or out of range."""


class SourceError(NoveltyError):
    """Raw input is missing, unreadable or not what its description says."""


class ChangedSource(SourceError):
    """A raw file is gone, or another than when it was listed: a passing fault, never a record."""

    def __init__(self, path: str, problem: str):
        super().__init__(
            f"{path} {problem}, though it was listed before; leave the raw files as they are while "
            "a build reads them, and run the same command again"
        )
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type["ChangedSource"], tuple[str, str]]:
        """It crosses processes too."""
        return type(self), (self.path, self.problem)


class ArchiveError(SourceError):
    """An archive is refused: unsafe member, bomb, encrypted, damaged."""


class RecordError(NoveltyError):
    """One record is bad; stages turn it into a quarantine row. `rule` names the failed check."""

    def __init__(self, rule: str, message: str):
        super().__init__(message)
        self.rule = rule
        self.message = SECRET.sub("…", message)

    def __reduce__(self) -> tuple[type["RecordError"], tuple[str, str]]:
        """It crosses processes: pickle would call it with the message alone."""
        return type(self), (self.rule, self.message)


class TooManyRejects(NoveltyError):
    """More records went to quarantine than the configured share allows."""


class LakeError(NoveltyError):
    """The lake cannot be written or read: no space, no permission, damaged file, unknown table."""


class LockedError(LakeError):
    """Another process is building the same thing."""


class TrainingError(NoveltyError):
    """A training diverged or ran out of memory; other trainings are not touched by it."""


class RunsFailed(NoveltyError):
    """Some runs of a build failed; what the others gave is published. Exit code 1."""

    exit_code = 1


class NativeError(NoveltyError):
    """A child process that ran native code died, hung, or left no usable result."""


class MissingDependency(NoveltyError):
    """An optional library or a system library is not installed; the message names the remedy."""


class MissingExtra(MissingDependency):
    """A library of an extra is absent or does not load; the message names the extra."""
