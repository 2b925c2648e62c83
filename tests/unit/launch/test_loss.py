"""Why a host cannot be used, and what is advised."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from shoal.launch.addresses import address_fault
from shoal.launch.hosts import Host
from shoal.launch.loss import Loss, loss_of, losses_together, torch_command, version_faults
from shoal.launch.messages import Address, Here
from shoal.launch.ssh import BAD_PYTHON, NO_PYTHON, NO_SHOAL, SSH_FAILED, find_python
from shoal.version import VERSION

HERE = Here(
    host="a", pid=1, python="/opt/python", python_version="3.11.7", shoal=VERSION, torch="2.10.0",
    seen_as="", seen_from="", cores=4, has_rsync=True,
)  # fmt: skip
A, B, C = (Host(name=name) for name in "abc")


def looked_for(python: Path, module: str = "timeit") -> tuple[int, str]:
    """The part of ssh's command that finds an interpreter, in a shell of this host."""
    host = Host(name="box", python=str(python), file="hosts.toml")
    done = subprocess.run(
        ["sh", "-c", find_python(host, module)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.defpath, "HOME": str(python.parent)},
    )
    return done.returncode, done.stdout + done.stderr


def loss(code: int, said: str = "") -> Loss:
    pinned = Host(name="box", python="/x/py", file="hosts.toml")
    return loss_of(pinned, code, said, was_up=False, by_ssh=True)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    made = tmp_path / "a python"
    made.touch(0o755)
    return made


def test_a_python_that_dies_is_told_of_with_what_it_said(python: Path) -> None:
    python.write_text("#!/bin/sh\necho libfoo.so: cannot open >&2\nexit 127\n")
    code, said = looked_for(python)
    assert code == BAD_PYTHON
    assert said == f"{python} ended with exit code 127:\nlibfoo.so: cannot open\n"
    python.write_text("#!/bin/sh\nexit 1\n")
    assert looked_for(python) == (
        BAD_PYTHON,
        f"{python} ended with exit code 1:\n(it said nothing)\n",
    )
    found = loss(BAD_PYTHON, "\n  libfoo")
    assert found.part == "python"
    assert found.text == (
        "box: its Python does not start.\n  libfoo\nMend it there, or give another: in hosts.toml, "
        'for box: python = "PATH"'
    )


def test_a_python_that_is_not_there(python: Path) -> None:
    absent = python.with_name("absent")
    assert looked_for(absent) == (NO_PYTHON, f"no program there: {absent}\n")
    assert looked_for(Path("~/absent"))[0] == NO_PYTHON
    found = loss(NO_PYTHON)
    assert "the Python that hosts.toml gives for it does not exist there" in found.what
    assert found.part == "python"


def test_a_python_without_shoal(python: Path) -> None:
    python.write_text(f"#!/bin/sh\nexit {NO_SHOAL}\n")
    assert looked_for(python) == (NO_SHOAL, f"none of these has shoal: {python}\n")
    found = loss(NO_SHOAL)
    assert found.part == "shoal"
    assert "shoal hosts install box --hosts hosts.toml" in found.remedy
    named = loss_of(Host(name="box", ssh="me@box"), NO_SHOAL, "", was_up=False, by_ssh=True)
    assert named.remedy == "Install it: shoal hosts install me@box"


def test_a_python_that_has_it_is_run(python: Path) -> None:
    python.write_text('#!/bin/sh\n[ "$1" != -m ] || echo "$@"\n')
    assert looked_for(python) == (0, "-m timeit\n")


BANNER = """
  Connection timed out during banner exchange
  Connection to 10.77.0.2 port 22 timed out"""
CHANGED = """
  Host key for [box]:2222 has changed and you have requested strict checking.
  Host key verification failed."""


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (BANNER, "its ssh server said nothing: it hangs"),
        ("\n  Connection to 10.77.0.2 port 22 timed out", "large packets were lost"),
        ("\n  ssh: connect to host box port 22: Connection timed out", "ping box"),
        (CHANGED, "ssh-keygen -R '[box]:2222'"),
        ("\n  Host key verification failed.", "Connect once by hand"),
        ("\n  Could not resolve hostname box", 'in hosts.toml, for box: ssh = "ADDRESS"'),
    ],
)
def test_what_ssh_says_and_what_is_advised(said: str, remedy: str) -> None:
    assert remedy in loss(SSH_FAILED, said).remedy


@pytest.mark.parametrize("said", ["\n  This account is currently not available.", ""])
def test_an_account_that_nobody_logs_in_to(said: str) -> None:
    """Nothing is wrong with shoal there."""
    found = loss(1, said)
    assert found.part == "ssh"
    assert "ssh box true" in found.remedy
    assert loss(1, "\n  ImportError").part == "shoal"


def ended(code: int, said: str = "", *, by_ssh: bool = True) -> Loss:
    return loss_of(A, code, said, was_up=True, by_ssh=by_ssh)


def test_how_an_agent_that_was_up_ended() -> None:
    """ssh tells of a program that was killed by its own failures' code, and not a word."""
    assert [ended(-9, by_ssh=False).way, ended(SSH_FAILED).way] == ["killed", "killed"]
    assert "its agent was killed" in ended(SSH_FAILED, "\n  Welcome to a!").text
    for said in (
        "Timeout, server a not responding.",
        "Connection to a closed by remote host.",
        "client_loop: send disconnect: Broken pipe",
    ):
        assert ended(SSH_FAILED, f"\n  {said}").way == "cut"
    assert ended(-9).way == "cut", "of ssh, here"
    assert ended(3).text == "a: its agent ended (exit code 3), and its ranks with it."


def test_where_all_are_cut_off_it_may_be_this_machine() -> None:
    losses = {name: Loss(name, "nothing was heard.", way="cut") for name in "ab"}
    assert losses_together([A, B], losses) == (
        "a: nothing was heard.\nb: nothing was heard.\n"
        "All at once: is it this machine that is cut off?"
    )
    assert "this machine" not in losses_together([A, B, C], losses)
    assert "this machine" not in losses_together([A], {"a": losses["a"]})
    losses["b"] = Loss("b", "killed.", way="killed")
    assert "this machine" not in losses_together([A, B], losses)


def test_other_versions_are_named_together_each_with_its_command() -> None:
    hellos = {
        "a": msgspec.structs.replace(HERE, torch="2.10.0+cpu"),
        "b": msgspec.structs.replace(HERE, torch="2.9.1", shoal="0.0.1"),
        "c": msgspec.structs.replace(HERE, torch="", python="/c/python"),
    }
    faults = version_faults([A, B, C], hellos)
    assert [fault.split(":")[0].split(",")[0] for fault in faults] == [
        "b has shoal 0.0.1", "b has torch 2.9.1", "c has torch (none)",
    ]  # fmt: skip
    assert faults[0].endswith("Install it: shoal hosts install b")
    assert faults[2].endswith(
        "a has 2.10.0+cpu; all must have the same. On c: /c/python -m pip install "
        "torch==2.10.0+cpu --index-url https://download.pytorch.org/whl/cpu"
    )
    assert version_faults([A, B], {"a": HERE, "b": HERE}) == []


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.10.0", "torch==2.10.0"),
        ("2.10.0+cu126", "torch==2.10.0+cu126 --index-url https://download.pytorch.org/whl/cu126"),
        ("2.10.0+mine", "torch==2.10.0+mine"),
        ("", "torch"),
    ],
)
def test_where_a_torch_is_had(version: str, words: str) -> None:
    assert torch_command("python", version) == f"python -m pip install {words}"


def test_addresses_and_interfaces_that_are_not_so() -> None:
    here = Address(address="10.0.0.2", interface="eth0", all_here="eth0 (10.0.0.2)")
    assert address_fault(Host(name="a", interface="eth0"), here) == ""
    assert address_fault(Host(name="a", address="10.0.0.2"), here) == ""
    other = Host(name="a", address="10.9.9.9", file="hosts.toml")
    assert address_fault(other, msgspec.structs.replace(here, interface="")) == (
        'address = "10.9.9.9": is no address of its own. It has: eth0 (10.0.0.2). Change it: in '
        'hosts.toml, for a: address = "ADDRESS"'
    )
    fault = address_fault(Host(name="a", interface="docker0"), here)
    assert 'interface = "docker0": the address that the others find it by' in fault
    assert 'for a: interface = "eth0", or address = that of docker0' in fault
    fault = address_fault(Host(name="a", interface="nix"), Address(fault="There is none."))
    assert fault == 'There is none. Change it: in a hosts.toml, for a: interface = "NAME"'
