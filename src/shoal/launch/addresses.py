"""Where hosts find each other: what hosts.toml says of addresses and interfaces, held against what
the hosts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal import network
from shoal.errors import MeetingError
from shoal.launch.agents import Agents
from shoal.launch.hosts import Host
from shoal.launch.messages import Address, FindAddress, Here


@dataclass(frozen=True)
class Site:
    """A host that is ready: where its ranks begin, and where they leave results."""

    host: Host
    hello: Here
    is_here: bool
    folder: str
    results: str
    run: str
    """The name of the run's part there."""
    interface: str | None = None
    """Which hosts.toml chooses for its ranks, by name or by address."""


def meeting_address(leader: Site, sites: Sequence[Site]) -> str:
    """Where the others find the leader: as the file says, else as ssh has it."""
    if leader.host.address:
        return leader.host.address
    if not leader.is_here:
        return leader.hello.seen_as
    return address_here([site.hello for site in sites])


def address_here(hellos: Sequence[Here]) -> str:
    """Where other hosts find this one."""
    if own := seen_here(hellos):
        return own[0]
    others = [hello.seen_as for hello in hellos if hello.seen_as]
    return network.address_towards(others[0]) if others else "127.0.0.1"


def seen_here(hellos: Sequence[Here]) -> list[str]:
    """Addresses of this host from which ssh came to others. Behind a jump host, or a router that
    puts its own address in place of ours, they see that one, and it is of no use."""
    own = {address for found in network.interfaces().values() for address in found}
    return [hello.seen_from for hello in hellos if hello.seen_from in own]


def with_interfaces(agents: Agents, sites: Sequence[Site]) -> list[Site]:
    """Those that hosts.toml chooses. Raises with every host of which it says what is not so."""
    meeting = meeting_address(sites[0], sites)
    is_alone = sum(site.host.slots for site in sites) == 1
    orders = {}
    for site in sites:
        if site.host.address or site.host.interface:
            # The leader's interface must have the address at which the others meet it.
            address = meeting if site is sites[0] and not is_alone else site.host.address
            orders[site.host.name] = FindAddress(address=address, interface=site.host.interface)
    found = agents.ask_each(orders, Address)
    faults = [
        f"{site.host.name}: {fault}"
        for site in sites
        if site.host.name in found and (fault := address_fault(site.host, found[site.host.name]))
    ]
    if faults:
        raise MeetingError("\n".join(faults))
    return [
        replace(site, interface=found[site.host.name].interface)
        if site.host.name in found
        else site
        for site in sites
    ]


def address_fault(host: Host, found: Address) -> str:
    """What hosts.toml says of this host's address or interface and is not so; empty: it is."""
    change = host.advise('address = "ADDRESS"' if host.address else 'interface = "NAME"')
    if found.fault:
        return f"{found.fault} Change it: {change}"
    if not found.interface:
        given = host.address or found.address
        return (
            f'address = "{given}": is no address of its own. It has: {found.all_here}. Change it: '
            f"{change}"
        )
    if host.interface and host.interface != found.interface:
        why = f"{host.file} gives" if host.address else "the others find it by, as ssh does"
        line = f'interface = "{found.interface}", or address = that of {host.interface}'
        return (
            f'interface = "{host.interface}": the address that {why}, {found.address}, is on '
            f"{found.interface}. It has: {found.all_here}. Make them agree: {host.advise(line)}"
        )
    return ""
