"""Verdicts on the way from one host to another. Pure."""

from __future__ import annotations

from shoal.doctor.cells import UNKNOWN, Cell, bad, ok, warning
from shoal.doctor.facts import Facts, HostFacts, PairFacts
from shoal.doctor.host_verdicts import line_for_hosts_toml
from shoal.launch.trial import LARGE_BYTES

SLOW_BITS_PER_S = 300e6
"""Below it, exchanging the gradients of a common model takes longer than computing them."""
LATE_S = 0.02
EXAMPLE_BYTES = 100e6
"""Gradients of 25 million parameters."""

_HOW = {
    "timeout": "no answer came",
    "refused": "the connection was refused",
    "rejected": "the connection was rejected",
    "absent": "nobody has this address",
    "no-route": "there is no route",
    "broken": "the connection broke",
}


def pair_cells(facts: Facts, pair: PairFacts) -> dict[str, Cell]:
    cells = {"port": _port(facts, pair)}
    if pair.fixed_port is not None:
        cells[f"port {pair.fixed_port}"] = _fixed_port(facts, pair)
    cells |= {
        "latency": _latency(pair),
        "large packets": _large(facts, pair),
        "bandwidth": _bandwidth(facts, pair),
    }
    return cells


def _port(facts: Facts, pair: PairFacts) -> Cell:
    if pair.skipped:
        return UNKNOWN
    target = facts.named(pair.target)
    if pair.fault:
        return bad(
            "no listener",
            f"{pair.target} cannot listen at {pair.address}: {pair.fault}.",
            line_for_hosts_toml(target),
        )
    if pair.measured is None:
        return UNKNOWN
    if not pair.measured.error:
        return ok("open")
    if pair.measured.latency_s is not None:  # there was a connection
        return warning("broke", f"the connection broke: {pair.measured.detail}.", "try again")
    return _blocked(facts, pair, target, pair.measured.error, "any port")


def _fixed_port(facts: Facts, pair: PairFacts) -> Cell:
    if pair.measured is None or pair.measured.fixed_error is None:
        return UNKNOWN
    if not pair.measured.fixed_error:
        return ok("open")
    target = facts.named(pair.target)
    return _blocked(facts, pair, target, pair.measured.fixed_error, f"port {pair.fixed_port}")


def _blocked(facts: Facts, pair: PairFacts, target: HostFacts, error: str, what: str) -> Cell:
    how = _HOW[error]
    place = f"{pair.target} at {pair.address}"
    if target.known_as and pair.address not in target.known_as:
        seen = ", ".join(target.known_as)
        return bad(
            "unreachable",
            f"{pair.source} does not reach {place} ({how}), while ssh reaches it at {seen}: wrong "
            "interface, or a firewall.",
            line_for_hosts_toml(target),
        )
    if error in ("absent", "no-route"):
        return bad(
            "no route",
            f"{pair.source} has no way to {place}: {how}.",
            f"bring both on one network; on {pair.source}: ip route get {pair.address}",
        )
    source = facts.named(pair.source)
    port = pair.fixed_port if what != "any port" else None
    return bad(
        "blocked",
        f"{pair.source} cannot connect to {what} of {place} ({how}): a firewall on {pair.target} "
        "blocks it.",
        _open(source, target, port),
    )


def _open(source: HostFacts, target: HostFacts, port: int | None) -> str:
    """The command that lets one host's connections in on another."""
    tools = target.condition.firewalls if target.condition else []
    address = source.address.address if source.address else "ADDRESS"
    if "firewall-cmd" in tools and "ufw" not in tools:
        command = (
            f"sudo firewall-cmd --permanent --zone=trusted --add-source={address} && "
            "sudo firewall-cmd --reload"
        )
    elif "ufw" in tools or not tools:
        command = f"sudo ufw allow from {address}"
        command += f" to any port {port} proto tcp" if port else ""
    elif "iptables" in tools:
        which = f" -p tcp --dport {port}" if port else ""
        command = f"sudo iptables -I INPUT -s {address}{which} -j ACCEPT"
    else:
        which = f" tcp dport {port}" if port else ""
        command = f"sudo nft insert rule inet filter input ip saddr {address}{which} accept"
    return f"on {target.name}: {command}"


def _latency(pair: PairFacts) -> Cell:
    if pair.measured is None or pair.measured.latency_s is None:
        return UNKNOWN
    found = pair.measured.latency_s
    text = f"{found * 1e3:.2f} ms"
    if found <= LATE_S:
        return ok(text)
    return warning(
        text,
        f"a small message takes {found * 1e3:.0f} ms there and back: many short steps will wait.",
        "use a cable instead of Wi-Fi, or larger batches",
    )


def _large(facts: Facts, pair: PairFacts) -> Cell:
    if pair.measured is None or pair.measured.large_bytes is None:
        return UNKNOWN
    if pair.measured.large_bytes > 0:
        return ok("arrive")
    source, target = facts.named(pair.source).address, facts.named(pair.target).address
    mtus = " and ".join(
        f"{end.mtu} on {name}'s {end.interface}"
        for name, end in ((pair.source, source), (pair.target, target))
        if end is not None and end.mtu
    )
    interface = source.interface if source else "INTERFACE"
    return bad(
        "lost (MTU)",
        f"small messages arrive, but none of {LARGE_BYTES // 1024} KiB sent at once: packets of "
        f"full size are lost on the way. The MTU is {mtus or 'unknown'}, and something between "
        "(a VPN, a tunnel, a switch) carries less.",
        f"on {pair.source}: sudo ip link set dev {interface} mtu 1280 (then raise it step by step)",
    )


def _bandwidth(facts: Facts, pair: PairFacts) -> Cell:
    if pair.measured is None or pair.measured.bytes_per_s is None:
        return UNKNOWN
    bits_per_s = pair.measured.bytes_per_s * 8
    text = rate_text(bits_per_s)
    if bits_per_s >= SLOW_BITS_PER_S:
        return ok(text)
    if bits_per_s == 0:
        return bad(
            "stops",
            "a stream of bytes comes to a halt on the way: packets are lost, perhaps those of full "
            "size (MTU).",
            f"on {pair.source}: ip -s link (are there errors?); then try a smaller MTU",
        )
    suspect = _suspect(facts, pair)
    address = facts.named(suspect).address
    interface = address.interface if address else "INTERFACE"
    seconds = EXAMPLE_BYTES * 8 / bits_per_s
    return warning(
        text,
        f"slow link: {text}; to send 100 MB (the gradients of 25 million parameters) takes "
        f"{seconds:.2g} s.",
        f"on {suspect}: ethtool {interface} | grep Speed (a slow port, a bad cable, Wi-Fi?)",
    )


def _suspect(facts: Facts, pair: PairFacts) -> str:
    """Which end of a slow link to look at: the one that has no fast link at all."""
    fast = set()
    for each in facts.pairs:
        rate = each.measured.bytes_per_s if each.measured else None
        if rate is not None and rate * 8 >= SLOW_BITS_PER_S:
            fast |= {each.source, each.target}
    return pair.target if pair.source in fast and pair.target not in fast else pair.source


def rate_text(bits_per_s: float) -> str:
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"
