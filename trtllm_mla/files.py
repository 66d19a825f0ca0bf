"""Reading and writing files so that nothing is half-written and nothing unexpected is trusted."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trtllm_mla.errors import UserError


@contextmanager
def atomic_directory(path: Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary directory that becomes ``path`` when the block ends without an exception.

    Args:
        path: The directory to make. Its parent is made if need be.
        marker: A file that every directory of this kind has. A directory without it is never replaced.
        overwrite: Replace a directory of this kind that is there.

    Raises:
        UserError: ``path`` is a file, or a directory with content that may not be replaced.
    """
    check_replaceable(path, marker=marker, overwrite=overwrite)
    path = resolve_output(path)
    absent = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True
        ) as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            try:
                new.mkdir()
                yield new
                if path.exists():
                    path.rename(old)
                new.rename(path)
            except BaseException:
                if old.exists() and not path.exists():
                    old.rename(path)
                raise
    except BaseException:
        for parent in absent:
            with suppress(OSError):  # another process may have put something there
                parent.rmdir()
        raise


def resolve_output(path: Path) -> Path:
    """The place that an output's path leads to, with links followed.

    Raises:
        UserError: The links lead in a circle.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # RuntimeError up to Python 3.12
        raise UserError(f"{path}: found links that lead in a circle. Name another output.") from None


def check_replaceable(path: Path, *, marker: str, overwrite: bool) -> None:
    """Checks that ``atomic_directory`` may write to a path; for long work, before it begins.

    Raises:
        UserError: ``path`` is a file, or a directory with content that may not be replaced.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path}: found a file, expected a directory to write to. Name another output directory.")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (path / marker).is_file():
        raise UserError(
            f"{path}: found a directory with other content (no {marker}), which is never replaced. Name another "
            "output directory."
        )
    if not overwrite:
        raise UserError(f"{path}: the directory is not empty. Name another output directory, or pass --overwrite.")


def check_writable(path: Path) -> None:
    """Checks that a file can be written; for long work, before it begins.

    Raises:
        UserError: ``path`` is a directory, is below a file, or the user may not write there.
    """
    if path.is_dir():
        raise UserError(f"{path}: found a directory, expected a file to write. Name a file in it.")
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"{path}: found no permission to write. Name another file.")
        return
    parent = next(item for item in resolve_output(path).parents if item.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = "a directory without permission to write" if parent.is_dir() else "a file"
        raise UserError(f"{path}: {parent} is {problem}, expected a writable directory. Name another file.")


def _is_stream(path: Path) -> bool:
    """Whether a path leads to a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that replaces it when the block ends without an exception.

    Links are followed. A device or a pipe, such as /dev/stdout, is written to as it is: there is nothing to replace.
    """
    if _is_stream(path):
        yield path
        return
    path = resolve_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    """Writes a value as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_json_lines(path: Path, values: Iterable[object]) -> None:
    """Writes one value a line as JSON (JSONL), atomically."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for value in values:
            file.write(json.dumps(value, allow_nan=False) + "\n")


def parse_json(text: str) -> Any:
    """Parses JSON, in which a key may not appear twice: readers would differ on which one counts.

    Raises:
        ValueError: It is no JSON, or a key appears twice in one object.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r:.80} appears twice")
    return result


def check_file(path: Path, expected: str) -> None:
    """Checks that a file is there to be read.

    Args:
        path: The file.
        expected: A sentence for the message: what it should be.

    Raises:
        UserError: There is none, or it is something else than a file.
    """
    if path.is_file():
        return
    kind = "found a directory" if path.is_dir() else "found a pipe or a device" if path.exists() else "no such file"
    raise UserError(f"{path}: {kind}. {expected}")


def read_table(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Reads a JSON object, or a TOML table where the name ends in ``.toml``.

    Args:
        path: The file.
        max_bytes: Size above which it is refused unread.

    Raises:
        UserError: The file is missing, too large, malformed, or holds no object.
    """
    check_file(path, "Expected a JSON or TOML file.")
    size = path.stat().st_size
    if size > max_bytes:
        raise UserError(f"{path}: found {size} bytes, expected at most {max_bytes}.")
    kind, parse = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", parse_json)
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid {kind}: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: found a {type(value).__name__} at the top level, expected a table of keys.")
    return value
