"""`shoal keygen`: a key for this machine, to be welcome on others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import KeyFileError
from shoal.wire.keys import (
    default_authorized_keys_path,
    default_key_path,
    new_pair,
    own_name,
    public_path,
    write_pair,
)


def keygen(
    key: Annotated[
        Path | None,
        typer.Option(help="Where to write the secret key. Default: ~/.config/shoal/key."),
    ] = None,
) -> None:
    """Make a key, by which other machines know this one.

    The secret key stays here. Its public line goes into authorized_keys on the other machines.
    """
    path = key or default_key_path()
    pair, name = new_pair(), own_name()
    write_pair(path, pair, name)
    told = (
        f"secret key: {path} (never copy it to another machine)\n"
        f"public key: {public_path(path)}\n"
        "\n"
        f"{pair.public} {name}\n"
        "\n"
        f"Append this line to {_from_home(default_authorized_keys_path())} on every machine that "
        "shall let this one in."
    )
    try:
        print(told, flush=True)
    except OSError as error:
        raise KeyFileError(
            f"the key was made, and cannot be shown ({error.strerror}): its public line is in "
            f"{public_path(path)}"
        ) from error


def _from_home(path: Path) -> str:
    """The path as it is on other machines, where home is elsewhere."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
