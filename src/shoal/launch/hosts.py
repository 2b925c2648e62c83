"""Which hosts: from `laptop,desktop:2` or a hosts.toml to a list of `Host`. Pure but for the file.

[hosts.laptop]                  # the first host leads

[hosts.desktop]
ssh = "me@desktop.local"        # what is typed behind ssh; default: the name
address = "192.168.0.2"         # where the crew finds it; default: where ssh does
slots = 2                       # ranks on it; default: 1
python = "~/venv/bin/python"    # default: that of `shoal hosts install`, else what is found
folder = "~/work"               # where runs have their folders; default: ~/.cache/shoal/runs
device = "cuda"                 # default: as --device says
interface = "enp3s0"            # default: the one on the route to the leader
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from pathlib import Path

import msgspec

from shoal.errors import SettingsError
from shoal.settings import DEVICES, unknown

MAX_SLOTS = 512
"""Each is a process: more of them are a slip of the finger."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine, and how to use it."""

    name: str
    ssh: str = ""
    address: str | None = None
    slots: int = 1
    python: str | None = None
    folder: str | None = None
    device: str | None = None
    interface: str | None = None
    file: str = ""
    """The hosts.toml that it is from; empty: the command line."""

    @property
    def target(self) -> str:
        """What is typed behind `ssh`."""
        return self.ssh or self.name

    @property
    def install_command(self) -> str:
        """That brings shoal to it."""
        if self.file:
            return f"shoal hosts install {self.name} --hosts {shlex.quote(self.file)}"
        return f"shoal hosts install {self.target}"

    def advise(self, line: str) -> str:
        """Where a setting of this host is to be written."""
        return f"in {self.file or 'a hosts.toml'}, for {self.name}: {line}"


EXAMPLES = {
    "ssh": '"me@desktop.local"',
    "address": '"192.168.0.2"',
    "slots": "2",
    "python": '"~/venv/bin/python"',
    "folder": '"~/work"',
    "device": '"cuda"',
    "interface": '"enp3s0"',
}
"""Every field of a host, as a file may have it."""


def read_hosts(text: str) -> list[Host]:
    """What --hosts says: names, or the path of a hosts.toml. Raises with every fault together."""
    if text.endswith(".toml") or Path(text).is_file():
        return _read_file(Path(text))
    hosts, faults = [], []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not _NAME.fullmatch(name):
            faults.append(f"--hosts {text}: {part.strip()!r} is no name of a host.")
        elif colon and not slots.isdecimal():
            faults.append(
                f"--hosts {text}: {part.strip()!r}: expected NAME or NAME:SLOTS, for example "
                f"{name}:2."
            )
        else:
            plain = name.rpartition("@")[2]
            hosts.append(Host(name=plain, ssh=name, slots=int(slots or 1)))
            faults += _slots_faults(f"--hosts {text}: {plain}", hosts[-1].slots)
    return _checked(hosts, f"--hosts {text}", faults)


def _read_file(path: Path) -> list[Host]:
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(
            [f"--hosts {path}: there is no such file. `shoal hosts init NAME NAME` writes one."]
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError([f"--hosts {path}: {error}."]) from error
    faults = [
        f"{path}: unknown table {name!r}; expected [hosts.NAME]."
        for name in content.keys() - {"hosts"}
    ]
    tables = content.get("hosts")
    if not isinstance(tables, dict):
        raise SettingsError([*faults, f"{path}: expected a table [hosts.NAME] for each host."])
    hosts = []
    for name, table in tables.items():
        try:
            hosts.append(_host(path, str(name), table))
        except SettingsError as error:
            faults += error.faults
    return _checked(hosts, str(path), faults)


def _host(path: Path, name: str, table: object) -> Host:
    where = f"{path}: host {name}"
    if not isinstance(table, dict):
        raise SettingsError([f"{where}: expected a table, [hosts.{name}]."])
    faults = [
        fault for field, value in table.items() for fault in _field_faults(where, field, value)
    ]
    if not _NAME.fullmatch(name):
        faults.append(f"{path}: {name!r} is no name of a host.")
    if faults:
        raise SettingsError(faults)
    return msgspec.convert({"name": name, "file": str(path), **table}, Host)


def _field_faults(where: str, field: str, value: object) -> list[str]:
    if field not in EXAMPLES:
        near = difflib.get_close_matches(field, EXAMPLES, 1)
        hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(EXAMPLES)}."
        return [f"{where}: unknown field {field!r}.{hint}"]
    example = f"for example {field} = {EXAMPLES[field]}"
    if field == "slots":
        if not isinstance(value, int) or isinstance(value, bool):
            return [f"{where}: slots = {_shown(value)}: expected a whole number, {example}."]
        return _slots_faults(where, value)
    if not isinstance(value, str):
        return [f"{where}: {field} = {_shown(value)}: expected text in quotes, {example}."]
    if not value.strip():
        return [f'{where}: {field} = "{value}": is empty. Leave it out, or give one, {example}.']
    if field == "ssh" and value.startswith("-"):
        return [f"{where}: ssh = {value!r} would be an option of ssh."]
    return unknown(f"{where}: device", value, DEVICES) if field == "device" else []


def _slots_faults(where: str, slots: int) -> list[str]:
    if slots < 1:
        return [f"{where}: slots must be at least 1, not {slots}."]
    return [f"{where}: slots = {slots}; at most {MAX_SLOTS}."] if slots > MAX_SLOTS else []


def _shown(value: object) -> str:
    """As the file has it, near enough to be found there."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _checked(hosts: list[Host], where: str, faults: list[str]) -> list[Host]:
    names = [host.name for host in hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"{where}: {name} is there twice. Say {name}:2 for two ranks on it.")
    if not hosts and not faults:
        faults.append(f"{where}: there are no hosts.")
    if faults:
        raise SettingsError(faults)
    return hosts
