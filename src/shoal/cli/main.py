"""The `shoal` program."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from shoal.cli.doctor import doctor
from shoal.cli.hosts import hosts_app
from shoal.cli.keygen import keygen
from shoal.cli.run import run
from shoal.cli.status import status
from shoal.cli.train import train
from shoal.cli.worker import worker
from shoal.errors import EXIT_FAILED, SettingsError, ShoalError
from shoal.version import VERSION

app = typer.Typer(
    name="shoal",
    help="Train one PyTorch model on the machines you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(keygen)
app.command()(worker)
app.command()(status)
app.add_typer(hosts_app)
app.command()(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {VERSION}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    """Train one PyTorch model on the machines you have."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """A mistake of the user's ends in a readable paragraph, never in a traceback."""
    try:
        app()
    except SettingsError as error:
        if "--debug" in sys.argv:
            raise
        print(f"shoal: this cannot be run:\n{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ShoalError as error:
        if "--debug" in sys.argv:
            raise
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # Whatever else is written to is named by a StorageError.
        if "--debug" in sys.argv or error.errno not in _NO_ROOM:
            raise
        _forget_output()
        print(
            f"shoal: what this command says cannot be written: {error.strerror}. Free some space "
            "where its output goes, or send it elsewhere.",
            file=sys.stderr,
        )
        sys.exit(EXIT_FAILED)


def _forget_output() -> None:
    """What could not be written is not tried once more at the end, which would be an error too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
