"""Why a host cannot be used, in words: what happened, what it said, what to do. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.launch.hosts import Host
from shoal.launch.messages import Here
from shoal.launch.ssh import BAD_PYTHON, NO_PYTHON, NO_SHOAL, SSH_FAILED
from shoal.version import VERSION

TORCH_INDEX = "https://download.pytorch.org/whl"
"""Below it: one folder for each label (`+cpu`, `+cu126`) of torch's versions."""


@dataclass(frozen=True)
class Loss:
    """Why a host is not with us."""

    host: str
    what: str
    said: str = ""
    """By its ssh, or by itself; each line begins on a new one."""
    remedy: str = ""
    part: str = "ssh"
    """Of the host, which is at fault: ssh, python or shoal."""
    way: Literal["", "cut", "silent", "late", "killed"] = ""
    """In which it was lost, once it was there: with the connection; its agent says nothing any
    more, or does not end its ranks; or somebody, perhaps the kernel for want of memory, has killed
    it, and it could not tidy up."""
    agent: int | None = None
    """The process id of its agent, where that may hang."""

    @property
    def text(self) -> str:
        return f"{self.host}: {self.what}{self.said}" + (f"\n{self.remedy}" if self.remedy else "")


def loss_of(host: Host, code: int, said: str, *, was_up: bool, by_ssh: bool) -> Loss:
    """Of a host whose agent has ended with this exit code."""
    name, line = host.name, host.advise('python = "PATH"')
    if was_up:
        return _loss_of_agent(name, code, said, by_ssh=by_ssh)
    if not by_ssh:
        return Loss(name, f"its agent ended at once (exit code {code}).", said, part="shoal")
    if code == NO_SHOAL:
        what = "shoal is not installed there."
        remedy = f"Install it: {host.install_command}"
        if host.python:
            what = f"the Python that {host.file} gives for it has no shoal."
            remedy = f"Install it into that one: {host.install_command}\nOr give another: {line}"
        return Loss(name, what, said, remedy, part="shoal")
    if code == BAD_PYTHON:
        remedy = f"Mend it there, or give another: {line}"
        return Loss(name, "its Python does not start.", said, remedy, part="python")
    if code == NO_PYTHON:
        what, remedy = "there is no Python on it.", f"Install one there, or say where it is: {line}"
        if host.python:
            what = f"the Python that {host.file} gives for it does not exist there."
            remedy = f"Give one that does: {line}"
        return Loss(name, what, said, remedy, part="python")
    if code == SSH_FAILED:
        return Loss(name, f"ssh {host.target} failed.", said, ssh_remedy(said, host))
    if "account is currently not available" in said or not said:  # nologin, false
        what = f"its login shell ended at once (exit code {code})."
        other = host.advise('ssh = "USER@ADDRESS"')
        remedy = f"May this user log in there? Try: ssh {host.target} true\nOr be another: {other}"
        return Loss(name, what, said, remedy)
    what = f"its agent ended at once (exit code {code})."
    return Loss(name, what, said, f"Install shoal anew: {host.install_command}", part="shoal")


def _loss_of_agent(name: str, code: int, said: str, *, by_ssh: bool) -> Loss:
    """Of one that was up. ssh has a code for a program that was killed, but it is that of its own
    failures, of which it tells."""
    is_told = re.search(r"Timeout, server|Connection|disconnect|remote host", said)
    if (code == SSH_FAILED and not is_told) if by_ssh else code == -signal.SIGKILL:
        what = "its agent was killed, and its ranks with it. Was there too little memory?"
        return Loss(name, what, said, part="shoal", way="killed")
    if by_ssh and (code < 0 or code == SSH_FAILED):
        return Loss(name, "the connection to it ended, and its ranks with it.", said, way="cut")
    return Loss(name, f"its agent ended (exit code {code}), and its ranks with it.", said)


def losses_together(hosts: Sequence[Host], losses: Mapping[str, Loss]) -> str:
    """All of them, in words. hosts: those that are reached by ssh."""
    text = "\n".join(loss.text for loss in losses.values())
    lost = [losses[host.name] for host in hosts if host.name in losses]
    if (
        len(hosts) > 1
        and len(lost) == len(hosts)
        and all(loss.way in ("cut", "silent") for loss in lost)
    ):
        text += "\nAll at once: is it this machine that is cut off?"
    return text


def ssh_remedy(said: str, host: Host) -> str:
    if "Permission denied" in said:
        return f"Make your key known there: ssh-copy-id {host.target}"
    if changed := re.search(r"Host key for (\S+) has changed", said):
        return (
            f"Its key is not the one that is known here. If you know why (it was set up anew), "
            f"forget the old one: ssh-keygen -R '{changed[1]}'\nThen connect once by hand, and "
            f"compare the new one: ssh {host.target}"
        )
    if "Host key verification failed" in said:
        return f"Connect once by hand, and compare its key: ssh {host.target}"
    if "Could not resolve" in said:
        return (
            "The name is not known here. Add it to ~/.ssh/config or /etc/hosts, or give another: "
            + host.advise('ssh = "ADDRESS"')
        )
    if "Connection refused" in said:
        return "No ssh server runs there. Start it there: sudo systemctl enable --now ssh"
    if "during banner exchange" in said:
        return (
            "The connection came about, and its ssh server said nothing: it hangs, or the host is "
            "overloaded. Start it anew there: sudo systemctl restart ssh"
        )
    if re.search(r"Connection to \S+ port \d+ timed out", said):  # not "connect to": it did
        return (
            "The connection came about, and then large packets were lost: a smaller MTU on the "
            "way? Try there: sudo ip link set dev INTERFACE mtu 1280"
        )
    if "timed out" in said or "No route to host" in said:
        return f"Is it switched on, and on this network? Try: ping {host.target}"
    return f"Try it by hand: ssh {host.target} true"


def version_faults(hosts: Sequence[Host], hellos: Mapping[str, Here]) -> list[str]:
    """Hosts with another shoal than ours, or with another torch than the first that has one."""
    faults = []
    first = next((host.name for host in hosts if hellos[host.name].torch), "")
    wanted = hellos[first].torch if first else ""
    for host in hosts:
        hello = hellos[host.name]
        if hello.shoal != VERSION:
            faults.append(
                f"{host.name} has shoal {hello.shoal}, this host has {VERSION}; all must have the "
                f"same. Install it: {host.install_command}"
            )
        if hello.torch != wanted:
            faults.append(
                f"{host.name} has torch {hello.torch or '(none)'}, {first} has {wanted}; all must "
                f"have the same. On {host.name}: {torch_command(hello.python, wanted)}"
            )
    return faults


def torch_command(python: str, version: str) -> str:
    """That installs this torch; where it is not on PyPI, from where it is."""
    command = f"{python} -m pip install torch" + (f"=={version}" if version else "")
    index = torch_index(version)
    return f"{command} --index-url {index}" if index else command


def torch_index(version: str) -> str:
    """Where a version with a label is had; empty: on PyPI, or nobody knows."""
    label = version.partition("+")[2]
    known = re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", label)
    return f"{TORCH_INDEX}/{label}" if known else ""
