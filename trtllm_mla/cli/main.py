"""The ``trtllm-mla`` command."""

from __future__ import annotations

import sys

import typer
from rich.text import Text

from trtllm_mla._version import __version__
from trtllm_mla.cli.bench import bench
from trtllm_mla.cli.build import build
from trtllm_mla.cli.calibrate import calibrate
from trtllm_mla.cli.console import ERR, accept_any_text
from trtllm_mla.cli.convert import convert
from trtllm_mla.cli.generate import generate
from trtllm_mla.cli.inspect import inspect
from trtllm_mla.cli.plugin_library import plugin_library
from trtllm_mla.cli.report import report
from trtllm_mla.cli.roofline import roofline
from trtllm_mla.cli.shapes import shapes
from trtllm_mla.cli.validate import validate
from trtllm_mla.errors import UserError, one_line

USER_ERROR = 2
# As shells report it: 128 and the number of the signal.
INTERRUPTED = 130

app = typer.Typer(
    name="trtllm-mla",
    help="Turns Multi-head Latent Attention checkpoints into TensorRT engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"trtllm-mla {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    pass


for command in (inspect, convert, calibrate, build, validate, generate, roofline, report, shapes):
    app.command()(command)
app.command(name="plugin-library")(plugin_library)
app.add_typer(bench, name="bench")


def run() -> None:
    """Runs the command line. A user's mistake is one message on standard error and exit status 2.

    So is what the operating system refuses: a file that may not be read, a full disk. An interrupt is exit status 130.
    """
    accept_any_text()
    try:
        app()
    except (UserError, OSError) as error:
        ERR.print(Text.assemble(("Error: ", "bold red"), one_line(str(error))), soft_wrap=True)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
