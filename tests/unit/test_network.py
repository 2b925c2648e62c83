"""This host's interfaces, addresses and routes, as they really are."""

from __future__ import annotations

import socket

import pytest

from shoal import network
from shoal.errors import MeetingError


def loopback() -> str:
    name = network.interface_with("127.0.0.1")
    assert name is not None
    return name


def test_interfaces_have_names_and_addresses() -> None:
    found = network.interfaces()
    assert "127.0.0.1" in found[loopback()]
    assert all(addresses for addresses in found.values())
    assert not any("%" in ip for ips in found.values() for ip in ips), "no zone in an address"


def test_every_interface_is_in_the_description() -> None:
    described = network.describe_interfaces()
    for name, addresses in network.interfaces().items():
        assert f"{name} ({addresses[0]})" in described


def test_the_address_of_an_interface() -> None:
    assert network.address_of(loopback()) == "127.0.0.1", "IPv4 where there is one"


def test_an_interface_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(MeetingError) as caught:
        network.address_of("eth99")
    message = str(caught.value)
    assert "no interface 'eth99'" in message
    assert socket.gethostname() in message
    for name in network.interfaces():
        assert name in message


def test_the_interface_of_an_address() -> None:
    for name, addresses in network.interfaces().items():
        assert network.interface_with(addresses[0]) == name
    assert network.interface_with("127.0.1.1") == loopback(), "Debian's /etc/hosts uses this one"
    assert network.interface_with("203.0.113.9") is None


def test_loopback() -> None:
    assert network.is_loopback("127.0.1.1")
    assert network.is_loopback("::1")
    assert not network.is_loopback("10.77.0.1")


def test_resolve() -> None:
    assert network.resolve("127.0.0.1") == "127.0.0.1"
    assert network.resolve("localhost") == "127.0.0.1", "IPv4 where there is one"
    assert network.resolve("::1") == "::1"


# Names that are too long, or no names: refused on this host, so that nothing is sent anywhere.
@pytest.mark.parametrize("name", [".".join(["a" * 60] * 5), "a" * 300, ".x"])
def test_a_name_that_nobody_knows(name: str) -> None:
    with pytest.raises(MeetingError) as caught:
        network.resolve(name)
    message = str(caught.value)
    assert f"{name!r} is not known on {socket.gethostname()}" in message
    assert "Give an address instead" in message


def test_the_address_towards_loopback_is_loopback() -> None:
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.address_towards("127.0.1.1") in ("127.0.0.1", "127.0.1.1")


def test_the_outward_address_is_one_of_this_host() -> None:
    assert network.interface_with(network.outward_address()) is not None


def test_a_reserved_port_is_for_who_asks_by_number() -> None:
    ports = [network.reserve_port() for _ in range(20)]
    assert len(set(ports)) == len(ports), "the system does not give a reserved port again"
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", ports[0]))
        listener.listen(1)
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=5):
            accepted, _ = listener.accept()
            accepted.close()
