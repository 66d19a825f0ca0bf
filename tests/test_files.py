from pathlib import Path

import pytest

from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, atomic_file, read_json, write_json


def fail_after_writing(path: Path) -> None:
    path.write_text("half")
    raise RuntimeError


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with atomic_directory(target) as temporary:
        (temporary / "a").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "out") as temporary:
        fail_after_writing(temporary / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("x")
    with pytest.raises(RuntimeError), atomic_directory(tmp_path / "out", overwrite=True):
        raise RuntimeError
    assert (tmp_path / "out" / "old").read_text() == "x"


def test_a_directory_with_content_is_kept_unless_told(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    with pytest.raises(UserError, match="not empty"), atomic_directory(tmp_path):
        pass
    assert (tmp_path / "old").exists()
    with atomic_directory(tmp_path, overwrite=True) as temporary:
        (temporary / "new").write_text("y")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="found a file"), atomic_directory(tmp_path / "out", overwrite=True):
        pass


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), atomic_file(path) as temporary:
        fail_after_writing(temporary)
    assert read_json(path, max_bytes=100) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "not valid JSON"), (b"[]", "found a JSON list"), (b"\xff", "not valid JSON"), (b" " * 101, "at most 100")],
)
def test_unusable_json_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_json(path, max_bytes=100)
