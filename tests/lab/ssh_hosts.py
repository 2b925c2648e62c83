"""Hosts with ssh for the tests: network namespaces on one switch, each with an sshd of its own.

                         switch (a bridge, in a namespace of its own)
                        /                |                \\
    laptop 10.77.0.1        desktop 10.77.0.2        server 10.77.0.3

Each host has its own host name, interface names, /etc/hosts, /run, home directory, ssh host key
and, if ordered, a slow cable. Any host's user reaches any host with `ssh NAME`, no option needed.
The rest of the file system and the list of processes are shared. Needs root.

    with ssh_lab(tmp_path, ("laptop", "desktop"), rates={"desktop": "100mbit"}) as lab:
        Running(folder, lab.command("laptop", *SHOAL, "train", "--hosts", "laptop,desktop"))
        lab["desktop"].cut_off()

Nothing of it is in the machine's own network, and nothing outlives it: after a
crash, the next use removes what was left.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hosts
from hosts import Host, namespace, remove_leftovers, until_up
from hosts import _ip as ip
from processes import ENOUGH_S, until

SSHD = "/usr/sbin/sshd"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = {
    "tc": "iproute2",
    "mount": "mount",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    SSHD: "openssh-server",
}
NOT_ITS_OWN = ("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
"""What the variables of whoever runs the tests would tell a host's user about the real machine."""

# In the mount namespace that `ip netns exec` makes: these mounts end with the process.
_MOVE_IN = """
mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/passwd" /etc/passwd &&
mount --bind "$0/run" /run && exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class SshHost(Host):
    """A machine with an sshd, and a user (root) with a home directory on it."""

    folder: Path
    """What is different from other hosts: /etc/hosts, /etc/passwd, /run; what sshd needs, and says.
    Only these are written to: hosts see the change at once."""
    home: Path
    """The user's, with the .ssh in it; every host has another."""
    switch: str
    port: str
    """The other end of its cable."""
    _sshd: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False, compare=False)

    def command(self, *argv: str) -> list[str]:
        """`argv` as its user runs it here; the process that results is `argv`'s own.

        Variables are the caller's, except for those that say who and where the user is.
        """
        mine = [f"HOME={self.home}", "USER=root", "LOGNAME=root"]
        others = [word for name in NOT_ITS_OWN for word in ("-u", name)]
        moved_in = ["sh", "-c", _MOVE_IN, str(self.folder)]
        return super().command(*moved_in, "env", *others, *mine, *argv)

    def run(
        self, *argv: str, cwd: Path | None = None, limit_s: float = ENOUGH_S
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` here to its end, with no input."""
        return subprocess.run(
            self.command(*argv),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def processes(self) -> list[int]:
        """The process ids of all that runs here, except for the sshd that listens."""
        listening = {sshd.pid for sshd in self._sshd}
        return [pid for pid in hosts.processes(self.namespace) if pid not in listening]

    def set_etc_hosts(self, text: str) -> None:
        (self.folder / "hosts").write_text(text)

    # -- faults, and their end

    def cut_off(self) -> None:
        """Pull the cable out: addresses and connections stay, and nothing comes through."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        ip("-n", self.switch, "link", "set", self.port, "up")
        until_up(self)

    def start_sshd(self) -> None:
        """Returns when it listens."""
        log = self.sshd_log
        heard = len(log.read_bytes()) if log.exists() else 0
        with log.open("ab") as out:
            argv = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            sshd = subprocess.Popen(
                self.command(*argv),
                env={"PATH": PATH},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._sshd.append(sshd)

        def listens() -> bool:
            said = log.read_bytes()[heard:].decode(errors="replace")
            assert sshd.poll() is None, f"sshd on {self.name} ended: {said}"
            return "Server listening on" in said

        until(listens, f"sshd on {self.name} listens")

    def stop_sshd(self) -> None:
        """From now on connections are refused; those that there are stay, as on a real host."""
        while self._sshd:
            sshd = self._sshd.pop()
            sshd.terminate()
            sshd.wait(ENOUGH_S)

    def freeze_sshd(self) -> None:
        """From now on connections come about and nobody answers; those that there are stay."""
        for sshd in self._sshd:
            sshd.send_signal(signal.SIGSTOP)

    def thaw_sshd(self) -> None:
        for sshd in self._sshd:
            sshd.send_signal(signal.SIGCONT)

    @property
    def sshd_log(self) -> Path:
        return self.folder / "sshd.log"

    def end_processes(self) -> None:
        """Kill all that runs here, sshd too: what a power cut does to processes."""
        hosts.kill_processes(self.namespace)
        while self._sshd:
            self._sshd.pop().wait(ENOUGH_S)

    def block_port(self, port: int | str, *, silently: bool = True) -> None:
        """A firewall for new connections from elsewhere to a port ("8000") or ports ("8000-8010").

        Silently: the caller hears nothing (ufw). Otherwise it is told at once (firewalld).
        """
        self._local_addresses_after_firewall()
        coming_in = ["iif", self.interface, "ipproto", "tcp", "dport", str(port)]
        verdict = "blackhole" if silently else "prohibit"
        if not silently:  # only a host that forwards tells of it
            setting = f"/proc/sys/net/ipv4/conf/{self.interface}/forwarding"
            _run(*self.command("sh", "-c", f"echo 1 > {setting}"))
        ip("-n", self.namespace, "rule", "add", "pref", _FIREWALL, *coming_in, verdict)

    def unblock_ports(self) -> None:
        while ip("-n", self.namespace, "rule", "show", "pref", _FIREWALL).strip():
            ip("-n", self.namespace, "rule", "delete", "pref", _FIREWALL)

    def lose_packets_above(self, mtu: int) -> None:
        """Larger packets that this host sends are lost on the way, and nobody is told.

        So are single ones to it; a stream from others comes through. With 1500 all arrive again.
        Holds for connections made from now on.
        """
        one_by_one = ["gso_max_segs", "1"]  # else the cable carries bundles of any size
        ip("-n", self.namespace, "link", "set", self.interface, *one_by_one)
        ip("-n", self.switch, "link", "set", self.port, "mtu", str(mtu))

    def forget_key(self) -> None:
        """Nobody's key opens this host any more."""
        (self.folder / "authorized_keys").write_text("")

    def accept_key(self) -> None:
        """The users' key opens this host."""
        key = (self.home / ".ssh/id_ed25519.pub").read_text()
        (self.folder / "authorized_keys").write_text(key)

    def _local_addresses_after_firewall(self) -> None:
        """The kernel asks its list of own addresses first; a rule can only come before it if the
        list is moved."""
        if not ip("-n", self.namespace, "rule", "show", "pref", _LOCAL).strip():
            ip("-n", self.namespace, "rule", "add", "pref", _LOCAL, "lookup", "local")
            ip("-n", self.namespace, "rule", "delete", "pref", "0")


_FIREWALL, _LOCAL = "10", "20"


@dataclass(frozen=True)
class Lab:
    """The hosts, by name, in the order of their names."""

    hosts: tuple[SshHost, ...]

    def __getitem__(self, name: str) -> SshHost:
        return next(host for host in self.hosts if host.name == name)

    def command(self, name: str, *argv: str) -> list[str]:
        """`argv` as the user at that host runs it."""
        return self[name].command(*argv)


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = ", ".join(sorted({TOOLS[tool] for tool in missing}))
        return f"hosts with ssh need {', '.join(missing)} (apt: {packages})"
    return hosts.why_not()


@contextmanager
def ssh_lab(
    folder: Path,
    names: Sequence[str] = ("laptop", "desktop", "server"),
    *,
    rates: Mapping[str, str] | None = None,
    interfaces: Mapping[str, str] | None = None,
    dead_ends: Mapping[str, str] | None = None,
    etc_hosts: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Lab]:
    """Hosts of these names, each for a host's name to order:

    - rates: its cable's speed in each direction, as tc has it ("100mbit"); else unlimited
    - interfaces: what its interface is called, else eth0
    - dead_ends: the name of a second interface, 10.78.0.N, with nobody at the other end
    - etc_hosts: lines for its /etc/hosts ("127.0.1.1 desktop"), in place of what that has
      for these names otherwise
    """
    remove_leftovers()
    folder = folder.resolve()
    interfaces = interfaces or {}
    unique = hosts.unique_name()
    switch = f"{unique}-switch"
    lab = Lab(
        tuple(
            SshHost(
                f"{unique}-{number}",
                name,
                f"10.77.0.{number}",
                interfaces.get(name, "eth0"),
                folder=folder / f"host-{name}",
                home=folder / f"home-{name}",
                switch=switch,
                port=f"port{number}",
            )
            for number, name in enumerate(names, start=1)
        )
    )
    with ExitStack() as stack:
        stack.enter_context(namespace(switch))
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for host in lab.hosts:
            stack.enter_context(namespace(host.namespace))
            _connect(host)
            if rate := (rates or {}).get(host.name):
                _slow_down(host, rate)
            if name := (dead_ends or {}).get(host.name):
                _lead_nowhere(host, name)
        _furnish(lab, folder, etc_hosts or {})
        for host in lab.hosts:
            stack.callback(host.end_processes)
            until_up(host)
            host.start_sshd()
        yield lab


def _connect(host: SshHost) -> None:
    inside = ("-n", host.namespace)
    plug = ["type", "veth", "peer", "name", host.port, "netns", host.switch]
    ip(*inside, "link", "add", host.interface, *plug)
    ip("-n", host.switch, "link", "set", host.port, "master", "switch", "up")
    ip(*inside, "address", "add", f"{host.address}/24", "dev", host.interface)
    ip(*inside, "link", "set", host.interface, "up")
    ip(*inside, "link", "set", "lo", "up")


def _slow_down(host: SshHost, rate: str) -> None:
    """What the host sends is held back at its end of the cable; what it gets, at the switch's."""
    for place, interface in ((host.namespace, host.interface), (host.switch, host.port)):
        bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        argv = ["tc", "-n", place, "qdisc", "replace", "dev", interface, "root", *bucket]
        _run(*argv)


def _lead_nowhere(host: SshHost, interface: str) -> None:
    inside = ("-n", host.namespace)
    end = f"{host.port}-end"
    plug = ["type", "veth", "peer", "name", end, "netns", host.switch]
    ip(*inside, "link", "add", interface, *plug)
    ip("-n", host.switch, "link", "set", end, "up")
    address = host.address.replace("10.77.", "10.78.")
    ip(*inside, "address", "add", f"{address}/24", "dev", interface)
    ip(*inside, "link", "set", interface, "up")


def _furnish(lab: Lab, folder: Path, etc_hosts: Mapping[str, Sequence[str]]) -> None:
    """The files of every host: one key for the users of all, a host key for each."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "id_ed25519"
    _make_key(key, "user@lab")
    for host in lab.hosts:
        (host.folder / "run/sshd").mkdir(parents=True)
        (host.folder / "run/sshd").chmod(0o755)
        (host.home / ".ssh").mkdir(parents=True, mode=0o700)
        _make_key(host.folder / "host_key", f"root@{host.name}")
    for host in lab.hosts:
        host.set_etc_hosts(_etc_hosts(lab, etc_hosts.get(host.name, ())))
        (host.folder / "passwd").write_text(_passwd(host.home))
        (host.folder / "sshd_config").write_text(_sshd_config(host))
        for name in ("id_ed25519", "id_ed25519.pub"):
            shutil.copy(folder / name, host.home / ".ssh" / name)
        (host.home / ".ssh/known_hosts").write_text(_known_hosts(lab, host))
        (host.home / ".ssh/config").write_text("Host *\n    IdentityFile ~/.ssh/id_ed25519\n")
        (host.home / ".ssh/config").chmod(0o600)
        host.accept_key()


def _make_key(path: Path, comment: str) -> None:
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def _etc_hosts(lab: Lab, ordered: Sequence[str]) -> str:
    taken = {name for line in ordered for name in line.split()[1:]}
    usual = [("127.0.0.1", "localhost"), *((host.address, host.name) for host in lab.hosts)]
    lines = [*ordered, *(f"{address} {name}" for address, name in usual if name not in taken)]
    return "\n".join(lines) + "\n"


def _passwd(home: Path) -> str:
    """The machine's, with another home for root: ssh and sshd look here, not at $HOME."""
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == "root":
            fields[5] = str(home)
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"


def _sshd_config(host: SshHost) -> str:
    """It listens on loopback too, as a real one does: a host's own name may stand for 127.0.1.1."""
    return f"""
Port 22
AddressFamily inet
ListenAddress 0.0.0.0
HostKey {host.folder}/host_key
PidFile {host.folder}/sshd.pid
AuthorizedKeysFile {host.folder}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
PrintLastLog no
Subsystem sftp internal-sftp
"""


def _known_hosts(lab: Lab, here: SshHost) -> str:
    lines = []
    for host in lab.hosts:
        key = " ".join((host.folder / "host_key.pub").read_text().split()[:2])
        names = [host.name, host.address]
        if host is here:
            names += ["localhost", "127.0.0.1", "127.0.1.1"]
        lines.append(f"{','.join(names)} {key}")
    return "\n".join(lines) + "\n"


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
