"""Reading and writing files so that nothing is half-written and nothing unexpected is trusted."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    new, old = scratch / "new", scratch / "old"
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
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that replaces it when the block ends without an exception."""
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


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.
        max_bytes: Size above which it is refused unread.

    Raises:
        UserError: The file is missing, too large, malformed, or holds no object.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    size = path.stat().st_size
    if size > max_bytes:
        raise UserError(f"{path}: found {size} bytes, expected at most {max_bytes}.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: found a JSON {type(value).__name__}, expected an object.")
    return value
