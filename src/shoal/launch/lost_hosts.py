"""Why a host is not with us, and what would mend it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.launch.hosts import Host
from shoal.launch.ssh import NO_SHOAL


@dataclass(frozen=True)
class Loss:
    """Why a host is not with us."""

    host: str
    what: str
    said: str = ""
    """By its ssh, or by itself; each line begins on a new one."""
    remedy: str = ""

    @property
    def text(self) -> str:
        return f"{self.host}: {self.what}{self.said}" + (f"\n{self.remedy}" if self.remedy else "")


def loss_of(
    host: Host, code: int | None, said: Sequence[str], *, has_come: bool, is_here: bool
) -> Loss:
    """Of a host whose agent, or the ssh to it, has ended with this exit code."""
    lines = indented(said)
    if code == NO_SHOAL:
        remedy = f"Install it: shoal hosts install {host.name}"
        return Loss(host.name, "shoal is not installed there.", lines, remedy)
    if code == 255 and not has_come and not is_here:
        return Loss(host.name, f"ssh {host.target} failed.", lines, _remedy(lines, host))
    if not has_come:
        return Loss(host.name, f"its agent ended at once (exit code {code}).", lines)
    return Loss(host.name, "the connection to it ended, and its ranks with it.", lines)


def indented(said: Sequence[str]) -> str:
    """Each line on a new one."""
    return "".join(f"\n  {line}" for line in said if line.strip())


def _remedy(said: str, host: Host) -> str:
    if "Permission denied" in said:
        return f"Make your key known there: ssh-copy-id {host.target}"
    if "Host key verification failed" in said:
        return f"Connect once by hand, and compare its key: ssh {host.target}"
    if "Could not resolve" in said:
        return (
            f"The name is not known here. Add it to ~/.ssh/config or /etc/hosts, or give ssh = "
            f'"ADDRESS" for {host.name} in a hosts.toml.'
        )
    if "Connection refused" in said:
        return "No ssh server runs there. Start it there: sudo systemctl enable --now ssh"
    if re.search(r"Connection to \S+ port \d+ timed out", said):  # not "connect to": it did
        return (
            "The connection came about, and then large packets were lost: a smaller MTU on the "
            "way? Try there: sudo ip link set dev INTERFACE mtu 1280"
        )
    if "timed out" in said or "No route to host" in said:
        return f"Is it switched on, and on this network? Try: ping {host.target}"
    return f"Try it by hand: ssh {host.target} true"
