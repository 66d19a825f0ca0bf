import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, atomic_file, check_writable, read_table, write_json


def fail_after_writing(path: Path) -> None:
    path.write_text("half")
    raise RuntimeError


def directory(path: Path, **options: bool) -> AbstractContextManager[Path]:
    return atomic_directory(path, marker="config.json", **options)


def make_earlier(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("old")


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with directory(target) as temporary:
        (temporary / "a").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_finished_directory_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), directory(tmp_path / "out") as temporary:
        fail_after_writing(temporary / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_directory(tmp_path: Path) -> None:
    make_earlier(tmp_path / "out")
    with pytest.raises(RuntimeError), directory(tmp_path / "out", overwrite=True) as temporary:
        fail_after_writing(temporary / "a")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_an_overwrite_that_cannot_be_renamed_puts_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_earlier(tmp_path / "out")
    rename = Path.rename

    def refuse_the_new_one(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(OSError, match="no"), directory(tmp_path / "out", overwrite=True):
        pass
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_an_earlier_directory_is_kept_unless_told(tmp_path: Path) -> None:
    make_earlier(tmp_path / "out")
    with pytest.raises(UserError, match="not empty"), directory(tmp_path / "out"):
        pass
    with directory(tmp_path / "out", overwrite=True) as temporary:
        (temporary / "new").write_text("y")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_content_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "letter.txt").write_text("x")
    with pytest.raises(UserError, match="never replaced"), directory(tmp_path, overwrite=overwrite):
        pass
    assert (tmp_path / "letter.txt").exists()


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with directory(tmp_path / "out") as temporary:
        (temporary / "a").write_text("x")
    assert (tmp_path / "out" / "a").exists()


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="found a file"), directory(tmp_path / "out", overwrite=True):
        pass


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), atomic_file(path) as temporary:
        fail_after_writing(temporary)
    assert read_table(path, max_bytes=100) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "found a list at the top level"),
        (b"\xff", "not valid JSON"),
        (b" " * 101, "at most 100"),
    ],
)
def test_unusable_json_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_table(path, max_bytes=100)


def test_a_failure_removes_the_parents_that_were_made(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), directory(tmp_path / "deep" / "er" / "out") as temporary:
        fail_after_writing(temporary / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "message"), [(".", "found a directory"), ("file/report.json", "is a file")])
def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=message):
        check_writable(tmp_path / name)


def test_a_report_below_directories_that_are_yet_to_be_made_is_accepted(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "report.json")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join(60)
    assert read == ['{\n  "a": 1\n}\n']
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.json", tmp_path / "link.json"
    link.symlink_to(target)
    check_writable(link)
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert read_table(target, max_bytes=100) == {"a": 1}
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "no such file"), ("directory", "found a directory"), ("pipe", "found a pipe or a device")],
)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"{name}: {message}. Expected a JSON or TOML file"):
        read_table(tmp_path / name, max_bytes=100)
