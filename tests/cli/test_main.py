import pytest

from trtllm_mla import __version__
from trtllm_mla.cli import main

COMMANDS = [
    *("inspect", "convert", "calibrate", "build", "validate", "generate", "roofline", "report", "shapes"),
    *("plugin-library", "bench latency", "bench throughput", "bench threshold", "bench compare", "bench endpoint"),
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(command, name):
    outcome = command(*name.split(), "--help")
    assert outcome.status == 0
    assert f"Example: trtllm-mla {name} " in " ".join(outcome.out.split())


def test_version(command):
    assert command("--version").out == f"trtllm-mla {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_arguments_are_a_users_mistake(command, name):
    outcome = command(*name.split())
    assert outcome.status == 2
    assert "Traceback" not in outcome.err


def test_an_unknown_command_is_a_users_mistake(command):
    assert command("compile").status == 2


def test_what_the_system_refuses_is_one_line_and_status_2(command, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr("trtllm_mla.checkpoint.files.Checkpoint.open", refuse)
    outcome = command("inspect", tmp_path)
    assert outcome.status == 2
    assert outcome.err == "Error: [Errno 13] Permission denied: 'config.json'\n"


def test_a_message_with_line_breaks_stays_one_line(command, tmp_path):
    outcome = command("inspect", tmp_path / "a\nb\x1b[2J")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert "a\\nb\\x1b[2J: no such directory" in outcome.err


def test_an_interrupt_is_no_traceback(command, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupt)
    outcome = command()
    assert (outcome.status, outcome.err) == (130, "")
