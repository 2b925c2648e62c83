"""The `shoal` program."""

from __future__ import annotations

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
from shoal.errors import SettingsError, ShoalError
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
