"""This host's interfaces and addresses, and which of them leads to another host."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from shoal.errors import MeetingError


def interfaces() -> dict[str, list[str]]:
    """Interface names that are up, with their IPv4 and IPv6 addresses."""
    stats = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name in stats and not stats[name].isup:
            continue
        ips = [
            a.address.split("%")[0]
            for a in addresses
            if a.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if ips:
            found[name] = ips
    return found


def describe_interfaces() -> str:
    """The interfaces as one line for an error message."""
    return ", ".join(f"{name} ({ips[0]})" for name, ips in sorted(interfaces().items()))


def address_of(interface: str) -> str:
    """The address of a named interface; IPv4 where it has one."""
    found = interfaces().get(interface)
    if found is None:
        raise MeetingError(
            f"There is no interface {interface!r} on {socket.gethostname()}. "
            f"It has: {describe_interfaces()}."
        )
    return min(found, key=lambda ip: ":" in ip)


def interface_with(address: str) -> str | None:
    """The interface that holds `address`; all of 127.0.0.0/8 is the loopback interface."""
    for name, ips in interfaces().items():
        if address in ips:
            return name
    if is_loopback(address):
        return next((n for n, ips in interfaces().items() if any(map(is_loopback, ips))), None)
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def resolve(host: str) -> str:
    """The address of a host name, IPv4 where there is one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise MeetingError(
            f"The name {host!r} is not known on {socket.gethostname()} ({error}). "
            f"Give an address instead of a name, or add the name to /etc/hosts."
        ) from error
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return str(found[0][4][0])


def address_towards(peer: str) -> str:
    """The local address from which packets to `peer` leave. Sends nothing."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # picks the route; a datagram socket sends nothing here
        except OSError as error:
            raise MeetingError(
                f"{socket.gethostname()} has no route to {peer} ({error.strerror}). "
                f"Its interfaces: {describe_interfaces()}. Is it on the same network?"
            ) from error
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """The address on the way to anywhere else; else of the one network there is; else loopback."""
    try:
        return address_towards("192.0.2.1")  # reserved: no machine that we could mean
    except MeetingError:
        others = [name for name, ips in interfaces().items() if not any(map(is_loopback, ips))]
        return address_of(others[0]) if len(others) == 1 else "127.0.0.1"


def reserve_port() -> int:
    """A free port on loopback that the system will not give to anyone else for a minute.

    A connection that was opened and closed on it leaves it in TIME_WAIT: from then on it is only
    given to a listener that asks for it by number.
    """
    with socket.socket() as listener, socket.socket() as visitor:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        visitor.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.close()
        return int(listener.getsockname()[1])
