"""Verdicts on one host. Pure."""

from __future__ import annotations

import ipaddress

from shoal.doctor.cells import UNKNOWN, Cell, bad, ok, warning
from shoal.doctor.facts import Facts, HostFacts
from shoal.launch.loss import torch_command
from shoal.launch.on_hosts import NEEDED_BYTES

CLOCK_WARNING_S = 2.0
CLOCK_BAD_S = 60.0
LITTLE_MEMORY_BYTES = 2**30
LITTLE_DISK_BYTES = 2**30


def host_cells(facts: Facts, host: HostFacts) -> dict[str, Cell]:
    return {
        "ssh": _ssh(host),
        "python": _python(facts, host),
        "torch": _torch(facts, host),
        "shoal": _shoal(facts, host),
        "clock": _clock(host),
        "code": _code(facts, host),
        "names": _names(facts, host),
        "interface": _interface(facts, host),
        "cores": _cores(host),
        "memory": _memory(host),
        "gpu": _gpu(host),
        "disk": _disk(host),
    }


def _ssh(host: HostFacts) -> Cell:
    if lost := _lost(host, "ssh"):
        return lost
    if host.hello is not None and host.greeting:
        return bad(
            "not clean",
            f"its shell prints {host.greeting!r} at every login, into all that is copied: no code "
            "comes there, and no results come back.",
            f"on {host.name}, at the top of ~/.bashrc: [ -t 1 ] || return (then `ssh "
            f"{host.host.target} true` prints nothing)",
        )
    return ok("here" if host.is_here else "ok")


def _lost(host: HostFacts, part: str) -> Cell | None:
    """Where this part of a host is why it is lost."""
    if host.lost is None or host.lost.part != part:
        return None
    text = "failed" if host.hello is None else "lost"
    said = " ".join(host.lost.said.split())
    remedy = "; ".join(host.lost.remedy.split("\n"))
    return bad(text, f"{host.lost.what} {said}".strip(), remedy)


# -- versions --------------------------------------------------------------------------------------


def _shoal(facts: Facts, host: HostFacts) -> Cell:
    if host.hello is None:
        return _lost(host, "shoal") or UNKNOWN
    found = host.hello.shoal
    if found == facts.shoal:
        return ok(found)
    return bad(
        found,
        f"it has shoal {found}, this host has {facts.shoal}; all must have the same.",
        host.host.install_command,
    )


def _torch(facts: Facts, host: HostFacts) -> Cell:
    if host.hello is None:
        return UNKNOWN
    known = [each.hello.torch for each in facts.hosts if each.hello and each.hello.torch]
    wanted, found = (known[0] if known else "", host.hello.torch)
    install = f"on {host.name}: {torch_command(host.hello.python, wanted)}"
    if not found:
        return bad("none", "torch is not installed there.", install)
    if found == wanted:
        return ok(found)
    first = next(each.name for each in facts.hosts if each.hello and each.hello.torch)
    return bad(
        found, f"it has torch {found}, {first} has {wanted}; all must have the same.", install
    )


def _python(facts: Facts, host: HostFacts) -> Cell:
    if host.hello is None:
        return _lost(host, "python") or UNKNOWN
    found = host.hello.python_version
    first = next(each for each in facts.hosts if each.hello)
    assert first.hello is not None
    wanted = first.hello.python_version
    if found.split(".")[:2] == wanted.split(".")[:2]:
        return ok(found)
    return warning(
        found,
        f"it has Python {found}, {first.name} has {wanted}: code may behave differently.",
        f"give a Python {'.'.join(wanted.split('.')[:2])}: " + host.host.advise('python = "PATH"'),
    )


def _code(facts: Facts, host: HostFacts) -> Cell:
    if facts.code is None and host.hello is not None:
        return ok("here" if host.is_here else "copied")
    if facts.code is None or host.condition is None or host.condition.code is None:
        return UNKNOWN
    found = host.condition.code
    if found == facts.code:
        return ok(found[:8])
    remedy = "leave --no-sync out (the code is copied then), or bring the folders together"
    if not found:
        return bad("none", f"the folder {facts.project} does not exist there.", remedy)
    return bad(
        found[:8],
        f"the files in {facts.project} are not those that are here ({facts.code[:8]}).",
        remedy,
    )


def _clock(host: HostFacts) -> Cell:
    if host.clock is None:
        return UNKNOWN
    offset_s = host.clock.offset_s
    doubt_s = host.clock.round_trip_s / 2
    text = f"{offset_s:+.1f} s" if abs(offset_s) >= 0.1 else "0.0 s"
    if abs(offset_s) - doubt_s <= CLOCK_WARNING_S:
        return ok(text)
    where = "ahead of" if offset_s > 0 else "behind"
    sentence = f"its clock is {abs(offset_s):.1f} s {where} this host's: times in logs mislead."
    remedy = f"on {host.name}: sudo timedatectl set-ntp true"
    make = bad if abs(offset_s) - doubt_s > CLOCK_BAD_S else warning
    return make(text, sentence, remedy)


# -- names and addresses ---------------------------------------------------------------------------


def _names(facts: Facts, host: HostFacts) -> Cell:
    if host.condition is None:
        return UNKNOWN
    own = host.condition.own_name
    stands_for = host.condition.names.get(own, "")
    address = host.address.address if host.address else ""
    if host.known_as and address not in host.known_as:
        address = host.known_as[0]
    edit = f"on {host.name}, in /etc/hosts: {address or 'ADDRESS'} {own}"
    if not stands_for:
        return warning("unknown", f"its own name, {own}, is not known on {host.name} itself.", edit)
    if len(facts.hosts) == 1:
        return ok(stands_for)
    if _is_loopback(stands_for):
        return warning(
            stands_for,
            f"its own name, {own}, stands for {stands_for} there, which no other host can reach: "
            "whoever meets by that name waits in vain.",
            f"{edit} (in place of {stands_for})",
        )
    for other in facts.hosts:
        if other.name == host.name or other.condition is None:
            continue
        found = host.condition.names.get(other.name, "")
        theirs = {ip for ips in other.condition.addresses.values() for ip in ips}
        if found and found not in theirs:
            wanted = other.address.address if other.address else "ADDRESS"
            return warning(
                f"{other.name}?",
                f"on {host.name}, {other.name} stands for {found}, which is no address of "
                f"{other.name}'s.",
                f"on {host.name}, in /etc/hosts: {wanted} {other.name}",
            )
    return ok(stands_for)


def _interface(facts: Facts, host: HostFacts) -> Cell:
    found = host.address
    if found is None:
        return UNKNOWN
    if found.fault:
        chose = host.host.address or host.host.interface
        return bad("none", found.fault, line_for_hosts_toml(host if chose else facts.leader))
    if not found.interface:
        return bad(
            found.address,
            f"{found.address} is no address of its own; it has {_describe(host)}.",
            line_for_hosts_toml(host),
        )
    text = f"{found.interface} {found.address}"
    if len(facts.hosts) > 1 and _is_loopback(found.address):
        return bad(
            text,
            f"it would meet the others at {found.address}, which no other host can reach "
            f"({host.why}).",
            line_for_hosts_toml(host),
        )
    if host.host.interface and host.host.interface != found.interface:
        return bad(
            text,
            f'{host.host.file} gives interface = "{host.host.interface}", but {found.address} is '
            f"on {found.interface}.",
            f"make interface and address in {host.host.file} agree, or leave one of them out",
        )
    coming = [pair for pair in facts.pairs if pair.target == host.name and pair.measured]
    reached = [pair for pair in coming if pair.measured and not pair.measured.error]
    if coming and not reached and host.known_as and found.address not in host.known_as:
        return bad(
            text,
            f"wrong interface: nobody reaches it at {found.address} ({found.interface}; "
            f"{host.why}), while ssh does at {', '.join(host.known_as)}.",
            line_for_hosts_toml(host),
        )
    return ok(text)


def line_for_hosts_toml(host: HostFacts) -> str:
    """That makes the others find it: by the address which ssh came in by, if it is known."""
    for name, addresses in host.condition.addresses.items() if host.condition else ():
        for known in host.known_as:
            if known in addresses and not _is_loopback(known):
                if host.host.interface:
                    return host.host.advise(f'interface = "{name}"')
                return host.host.advise(f'address = "{known}" (on {name})')
    return host.host.advise('address = "ADDRESS" of the network that all share')


def _describe(host: HostFacts) -> str:
    if host.condition is None:
        return "others"
    return ", ".join(f"{ips[0]} ({name})" for name, ips in sorted(host.condition.addresses.items()))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


# -- what it can carry -----------------------------------------------------------------------------


def _cores(host: HostFacts) -> Cell:
    if host.hello is None:
        return UNKNOWN
    cores, slots = host.hello.cores, host.host.slots
    if slots <= cores:
        return ok(str(cores))
    fewer = host.host.advise(f"slots = {cores}") if host.host.file else f"{host.name}:{cores}"
    return warning(
        str(cores),
        f"{slots} ranks would share {cores} cores.",
        f"give it fewer: {fewer}",
    )


def _memory(host: HostFacts) -> Cell:
    if host.condition is None:
        return UNKNOWN
    free, total = host.condition.free_memory_bytes, host.condition.memory_bytes
    text = f"{_gib(free)} of {_gib(total)} GiB"
    if free >= LITTLE_MEMORY_BYTES:
        return ok(text)
    return warning(
        text,
        f"{free // 2**20} MiB of memory are free.",
        f"on {host.name}, see who has it: ps aux --sort -rss | head",
    )


def _gpu(host: HostFacts) -> Cell:
    if host.condition is None:
        return UNKNOWN
    count = host.condition.gpus
    if count or host.host.device != "cuda":
        return ok(str(count) if count else "none")
    return bad(
        "none",
        f'{host.host.file} gives device = "cuda", and no NVIDIA driver is loaded there.',
        f'on {host.name}: nvidia-smi; or give device = "cpu"',
    )


def _disk(host: HostFacts) -> Cell:
    if host.condition is None:
        return UNKNOWN
    fault, free = host.condition.folder_fault, host.condition.free_disk_bytes
    if fault and not host.is_here:  # where the run folder is all that is needed
        remedy = "give one that this user may write: " + host.host.advise('folder = "PATH"')
        return bad("no folder", fault, remedy)
    text = f"{_gib(free)} GiB"
    if free >= LITTLE_DISK_BYTES:
        return ok(text)
    make = bad if free < NEEDED_BYTES else warning
    return make(
        text,
        f"{free // 2**20} MiB are free on the disk that its runs are on.",
        "free some, or give another disk: " + host.host.advise('folder = "PATH"'),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size < 10 * 2**30 else f"{size / 2**30:.0f}"
