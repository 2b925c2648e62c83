"""Which hosts: names on the command line, or a hosts.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SettingsError
from shoal.launch.hosts import Host, read_hosts


def faults_of(text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_hosts(text)
    return caught.value.faults


def test_names() -> None:
    assert read_hosts("laptop,desktop:2, me@lab.example.org") == [
        Host(name="laptop", ssh="laptop"),
        Host(name="desktop", ssh="desktop", slots=2),
        Host(name="lab.example.org", ssh="me@lab.example.org"),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no name of a host"),
        ("laptop,,desktop", "is no name of a host"),
        ("-oProxyCommand=x", "is no name of a host"),
        ("laptop;rm", "is no name of a host"),
        ("laptop:0", "laptop: slots must be at least 1, not 0"),
        ("laptop:", "'laptop:': expected NAME or NAME:SLOTS, for example laptop:2"),
        ("laptop:99999", "slots = 99999; at most 512"),
        ("laptop:two", "expected NAME or NAME:SLOTS"),
        ("laptop,laptop", "laptop is there twice. Say laptop:2"),
        ("absent.toml", "there is no such file. `shoal hosts init"),
    ],
)
def test_names_that_are_none(text: str, told: str) -> None:
    (fault,) = faults_of(text)
    assert told in fault


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(
        '[hosts.laptop]\n[hosts.desktop]\nssh = "me@10.0.0.2"\naddress = "10.0.0.2"\nslots = 2\n'
        'python = "~/venv/bin/python"\nfolder = "~/work"\ndevice = "cuda"\ninterface = "enp3s0"\n'
    )
    laptop, desktop = read_hosts(str(path))
    assert laptop == Host(name="laptop", file=str(path))
    assert laptop.target == "laptop"
    assert desktop.target == "me@10.0.0.2"
    assert (desktop.slots, desktop.device, desktop.interface) == (2, "cuda", "enp3s0")


def test_every_fault_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(
        'title = "x"\n[hosts.a]\nslot = 2\n[hosts.b]\nslots = "two"\n[hosts.c]\nslots = 0\n'
        'device = "gpu"\n[hosts.d]\nssh = "-oProxyCommand=x"\n[hosts]\ne = 3\n'
    )
    told = "\n".join(faults_of(str(path)))
    for part in (
        "unknown table 'title'",
        "host a: unknown field 'slot'. Did you mean slots?",
        'host b: slots = "two": expected a whole number, for example slots = 2.',
        "c: slots must be at least 1, not 0",
        "host c: device gpu: unknown",
        "would be an option of ssh",
        "host e: expected a table",
    ):
        assert part in told


def test_every_field_is_checked_in_our_own_words(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    texts = ("ssh", "address", "python", "folder", "device", "interface")
    empty = "".join(f'{field} = ""\n' for field in texts)
    numbers = "".join(f"{field} = 3\n" for field in texts)
    path.write_text(f'[hosts.a]\n{empty}[hosts.b]\n{numbers}slots = true\n[hosts.c]\nfile = "x"\n')
    faults = faults_of(str(path))
    for field in texts:
        assert any(f'host a: {field} = "": is empty. Leave it out' in fault for fault in faults)
        assert any(f"host b: {field} = 3: expected text in quotes" in fault for fault in faults)
    assert (
        f"{path}: host b: slots = true: expected a whole number, for example slots = 2." in faults
    )
    assert any("host c: unknown field 'file'" in fault for fault in faults)
    assert len(faults) == 2 * len(texts) + 2


def test_devices_are_those_of_the_option(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[hosts.a]\ndevice = "tpu"\n[hosts.b]\ndevice = "cpu"\n')
    assert faults_of(str(path)) == [
        f"{path}: host a: device tpu: unknown. Did you mean cpu? Known: auto, cpu, cuda."
    ]


def test_how_shoal_is_brought_to_a_host(tmp_path: Path) -> None:
    path = tmp_path / "my hosts.toml"
    path.write_text('[hosts.box]\nssh = "root@server"\n')
    (box,) = read_hosts(str(path))
    assert box.install_command == f"shoal hosts install box --hosts '{path}'"
    assert box.advise("slots = 2") == f"in {path}, for box: slots = 2"
    (box,) = read_hosts("root@server")
    assert box.install_command == "shoal hosts install root@server"


@pytest.mark.parametrize("text", ["", "[hosts]\n", "[[hosts]]\n", "not toml at all"])
def test_files_without_hosts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    assert faults_of(str(path))
