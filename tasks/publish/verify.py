"""Check that this folder is what was published. Needs Python 3.8 or newer and nothing else.

    python verify.py [FOLDER]     (default: the folder that holds this file)

Every file must have the SHA-256 that SHA256SUMS lists, none may be missing and none may be there
that is not listed; the key in manifest.json must be the one that the data files give. Names at the
top that begin with a dot are passed over: hosts of data sets put their own there.
Exit code: 0 all good, 1 something differs (each difference is a line), 2 the folder cannot be read.
"""

import hashlib
import json
import os
import re
import sys

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def data_key(sums: "dict[str, str]") -> str:
    """The content key: 32 hex digits of the SHA-256 of the lines of the data files, by path."""
    lines = sorted((path, digest) for path, digest in sums.items() if path.startswith("data/"))
    text = "".join(f"{digest}  {path}\n" for path, digest in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_sums(folder: str) -> "dict[str, str]":
    """SHA256SUMS as path -> digest; a line of another form raises ValueError."""
    sums = {}
    with open(os.path.join(folder, SUMS), encoding="utf-8", newline="") as file:
        for number, line in enumerate(file, 1):
            match = re.fullmatch(r"([0-9a-f]{64})  ([^\n\r\\]+)\n", line)
            parts = match.group(2).split("/") if match else [".."]
            if match is None or match.group(2) in sums or {"", ".", ".."} & set(parts):
                raise ValueError(f"line {number} of {SUMS} is not `digest  path`, each path once")
            sums[match.group(2)] = match.group(1)
    return sums


def files_in(folder: str) -> "set[str]":
    """Paths of all files, with `/`; dotted names at the top are left out."""
    paths = set()
    for root, folders, files in os.walk(folder):
        inside = os.path.relpath(root, folder).replace(os.sep, "/")
        if inside == ".":
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths |= {name for name in files if not name.startswith(".")}
        else:
            paths |= {f"{inside}/{name}" for name in files}
    return paths


def differences(folder: str) -> "list[str]":
    """One sentence per difference between the folder and its SHA256SUMS; none if it is whole."""
    try:
        sums = read_sums(folder)
    except FileNotFoundError:
        return [f"{SUMS} is missing: this is no published folder, or not all of one"]
    except ValueError as error:
        return [str(error)]
    files = files_in(folder)
    lines = [f"{path} is not listed in {SUMS}" for path in sorted(files - sums.keys() - {SUMS})]
    for path in sorted(sums):
        if path not in files:
            lines.append(f"{path} is missing")
        elif (digest := sha256_of(os.path.join(folder, path))) != sums[path]:
            lines.append(f"{path} has sha256 {digest[:16]}…, expected {sums[path][:16]}…")
    if not lines:
        try:
            with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
                key = json.load(file)["key"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"{MANIFEST} cannot be read: {error}"]
        if key != data_key(sums):
            lines.append(f"{MANIFEST} says key {key}, the data files give {data_key(sums)}")
    return lines


def main(words: "list[str]") -> int:
    folder = words[0] if words else os.path.dirname(os.path.abspath(__file__))
    if len(words) > 1 or folder.startswith("-"):
        print(__doc__)
        return 2
    try:
        os.listdir(folder)
        lines = differences(folder)
    except OSError as error:
        print(f"cannot read {folder}: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    if lines:
        print(f"{len(lines)} differences: this is not what was published")
        return 1
    sums = read_sums(folder)
    print(f"good: {len(sums)} files, key {data_key(sums)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
