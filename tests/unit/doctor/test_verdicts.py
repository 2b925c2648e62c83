"""From facts to verdicts, with no host and no process."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from shoal.cli.doctor_tables import show
from shoal.doctor.cells import Cell
from shoal.doctor.facts import ClockFacts, Facts, HostFacts, Lost, PairFacts
from shoal.doctor.verdicts import diagnose, findings
from shoal.launch.hosts import Host
from shoal.launch.messages import Address, Condition, Here, Measured

replace = msgspec.structs.replace
ADDRESSES = {"laptop": "10.77.0.1", "desktop": "10.77.0.2", "server": "10.77.0.3"}


def well(name: str, **host: object) -> HostFacts:
    address = ADDRESSES[name]
    return HostFacts(
        host=msgspec.convert({"name": name, **host}, Host),
        is_here=name == "laptop",
        hello=Here(
            host=name, pid=1, python="/usr/bin/python3", python_version="3.11.7", shoal="1.0",
            torch="2.10.0", seen_as=address, seen_from="10.77.0.1", cores=4,
            has_rsync=True,
        ),
        clock=ClockFacts(offset_s=0.01, round_trip_s=0.02),
        address=Address(address=address, interface="eth0", mtu=1500),
        why="it is on the route to laptop",
        known_as=[address],
        condition=Condition(
            own_name=name, names=ADDRESSES, addresses={"lo": ["127.0.0.1"], "eth0": [address]},
            memory_bytes=16 * 2**30, free_memory_bytes=8 * 2**30, gpus=0,
            free_disk_bytes=100 * 2**30, firewalls=[],
        ),
    )  # fmt: skip


FAST = Measured(latency_s=0.0002, large_bytes=65536, bytes_per_s=117e6)


def pair(source: str, target: str, measured: Measured | None = FAST, **more: object) -> PairFacts:
    address = ADDRESSES[target]
    values = {"source": source, "target": target, "address": address, **more}
    return PairFacts(**values, measured=measured)  # type: ignore[arg-type]


def crew(*hosts: HostFacts, pairs: list[PairFacts] | None = None, **more: object) -> Facts:
    if pairs is None:
        pairs = [pair("laptop", "desktop"), pair("desktop", "laptop")]
    return Facts(shoal="1.0", hosts=list(hosts), pairs=pairs, **more)  # type: ignore[arg-type]


def cell(facts: Facts, where: str, what: str) -> Cell:
    diagnosis = diagnose(facts)
    found = {row.name: row.cells for row in (*diagnosis.hosts, *diagnosis.pairs)}
    return found[where][what]


def desktop_with(**changes: object) -> Facts:
    return crew(well("laptop"), replace(well("desktop"), **changes))


def condition_with(**changes: object) -> Facts:
    condition = well("desktop").condition
    assert condition is not None
    return desktop_with(condition=replace(condition, **changes))


def hello_with(**changes: object) -> Facts:
    hello = well("desktop").hello
    assert hello is not None
    return desktop_with(hello=replace(hello, **changes))


def way_with(**changes: object) -> Facts:
    """To the desktop."""
    pairs = [pair("laptop", "desktop", replace(FAST, **changes)), pair("desktop", "laptop")]
    return crew(well("laptop"), well("desktop"), pairs=pairs)


def test_all_is_well() -> None:
    facts = crew(well("laptop"), well("desktop"))
    assert diagnose(facts).verdict == "ok"
    assert findings(diagnose(facts)) == []


def test_a_diagnosis_goes_into_json() -> None:
    content = msgspec.json.decode(msgspec.json.encode(diagnose(crew(well("laptop"), pairs=[]))))
    assert content["verdict"] == "ok"
    assert content["hosts"][0]["facts"]["address"]["interface"] == "eth0"
    assert content["hosts"][0]["cells"]["torch"]["text"] == "2.10.0"


# -- hosts


def test_a_host_that_ssh_does_not_reach() -> None:
    lost = Lost(what="ssh desktop failed.", said="port 22:\n  refused", remedy="start sshd")
    facts = crew(well("laptop"), HostFacts(host=Host(name="desktop"), lost=lost), pairs=[])
    found = cell(facts, "desktop", "ssh")
    assert found.verdict == "bad"
    assert found.sentence == "ssh desktop failed. port 22: refused"
    assert found.remedy == "start sshd"
    others = diagnose(facts).hosts[1].cells
    assert {c.verdict for what, c in others.items() if what != "ssh"} == {"unknown"}


@pytest.mark.parametrize("part", ["python", "shoal"])
def test_where_ssh_works_and_something_else_does_not(part: str) -> None:
    lost = Lost(what="its Python does not start.", said="libfoo", remedy="mend\nit", part=part)
    facts = crew(well("laptop"), HostFacts(host=Host(name="desktop"), lost=lost), pairs=[])
    assert cell(facts, "desktop", "ssh").verdict == "ok"
    found = cell(facts, "desktop", part)
    assert (found.verdict, found.sentence) == ("bad", "its Python does not start. libfoo")
    assert found.remedy == "mend; it"
    cells = diagnose(facts).hosts[1].cells
    assert [what for what, each in cells.items() if each.verdict == "bad"] == [part]


def test_other_versions() -> None:
    found = cell(hello_with(torch="2.9.1"), "desktop", "torch")
    assert found.verdict == "bad"
    assert "it has torch 2.9.1, laptop has 2.10.0" in found.sentence
    assert found.remedy == "on desktop: /usr/bin/python3 -m pip install torch==2.10.0"
    assert cell(hello_with(torch=""), "desktop", "torch").text == "none"
    found = cell(hello_with(shoal="0.9"), "desktop", "shoal")
    assert (found.verdict, found.remedy) == ("bad", "shoal hosts install desktop")
    assert cell(hello_with(python_version="3.12.1"), "desktop", "python").verdict == "warning"
    assert cell(hello_with(python_version="3.11.2"), "desktop", "python").verdict == "ok"


@pytest.mark.parametrize(
    ("offset_s", "round_trip_s", "verdict"),
    [
        (1.9, 0.0, "ok"),
        (-2.5, 0.1, "warning"),
        (2.5, 2.0, "ok"),  # it may as well be 1.5
        (61.0, 0.1, "bad"),
        (-4000.0, 0.1, "bad"),
    ],
)
def test_clocks(offset_s: float, round_trip_s: float, verdict: str) -> None:
    clock = ClockFacts(offset_s=offset_s, round_trip_s=round_trip_s)
    found = cell(desktop_with(clock=clock), "desktop", "clock")
    assert found.verdict == verdict
    if verdict != "ok":
        assert ("ahead" if offset_s > 0 else "behind") in found.sentence
        assert "timedatectl" in found.remedy


def test_code_is_compared_where_it_is_not_copied() -> None:
    assert cell(crew(well("laptop"), well("desktop")), "desktop", "code").text == "copied"
    hosts = condition_with(code="b" * 64).hosts
    found = cell(crew(*hosts, code="a" * 64, project="/work"), "desktop", "code")
    assert (found.verdict, found.text) == ("bad", "bbbbbbbb")
    assert cell(crew(*hosts, code="b" * 64), "desktop", "code").verdict == "ok"
    found = cell(crew(*condition_with(code="").hosts, code="a", project="/w"), "desktop", "code")
    assert "the folder /w does not exist there" in found.sentence


def test_a_name_on_loopback() -> None:
    found = cell(condition_with(names={"desktop": "127.0.1.1"}), "desktop", "names")
    assert (found.verdict, found.text) == ("warning", "127.0.1.1")
    assert "desktop, stands for 127.0.1.1 there" in found.sentence
    assert "/etc/hosts: 10.77.0.2 desktop" in found.remedy
    alone = crew(condition_with(names={"desktop": "127.0.1.1"}).hosts[1], pairs=[])
    assert cell(alone, "desktop", "names").verdict == "ok"


def test_names_that_are_unknown_or_of_others() -> None:
    assert cell(condition_with(names={"desktop": ""}), "desktop", "names").text == "unknown"
    names = {"desktop": "10.77.0.2", "laptop": "10.1.2.3"}
    found = cell(condition_with(names=names), "desktop", "names")
    assert found.verdict == "warning"
    assert "laptop stands for 10.1.2.3, which is no address of laptop's" in found.sentence
    # ssh has aliases that nobody else knows
    names = {"desktop": "10.77.0.2", "laptop": ""}
    assert cell(condition_with(names=names), "desktop", "names").verdict == "ok"


def test_a_wrong_interface() -> None:
    """As docker0 is, where ssh comes in by eth0."""
    desktop = replace(
        well("desktop", interface="docker0", file="mine.toml"),
        address=Address(address="10.78.0.2", interface="docker0", mtu=1500),
        why="mine.toml gives this interface",
    )
    lost = PairFacts(
        source="laptop", target="desktop", address="10.78.0.2", measured=Measured(error="timeout")
    )
    facts = crew(well("laptop"), desktop, pairs=[lost, pair("desktop", "laptop")])
    found = cell(facts, "desktop", "interface")
    assert found.verdict == "bad"
    assert "wrong interface: nobody reaches it at 10.78.0.2 (docker0" in found.sentence
    assert found.remedy == 'in mine.toml, for desktop: interface = "eth0"'
    found = cell(facts, "laptop -> desktop", "port")
    assert (found.verdict, found.text) == ("bad", "unreachable")
    assert "while ssh reaches it at 10.77.0.2" in found.sentence


def test_addresses_that_cannot_be() -> None:
    found = cell(desktop_with(address=Address(address="127.0.1.1", interface="lo")), "desktop",
                 "interface")  # fmt: skip
    assert found.verdict == "bad"
    assert "127.0.1.1, which no other host can reach" in found.sentence
    found = cell(desktop_with(address=Address(address="10.9.9.9")), "desktop", "interface")
    assert "10.9.9.9 is no address of its own; it has 10.77.0.2 (eth0)" in found.sentence
    found = cell(desktop_with(address=Address(fault="no route")), "desktop", "interface")
    assert (found.verdict, found.text, found.sentence) == ("bad", "none", "no route")
    assert found.remedy.startswith("in a hosts.toml, for laptop")  # where the route was to lead


def test_what_a_host_can_carry() -> None:
    facts = crew(well("laptop"), well("desktop", slots=5, device="cuda"))
    assert cell(facts, "desktop", "cores").verdict == "warning"
    assert cell(facts, "desktop", "cores").remedy == "give it fewer: desktop:4"
    listed = crew(well("laptop"), well("desktop", slots=5, file="hosts.toml"))
    assert cell(listed, "desktop", "cores").remedy.endswith("in hosts.toml, for desktop: slots = 4")
    assert cell(facts, "desktop", "gpu").verdict == "bad"
    assert cell(facts, "laptop", "gpu").verdict == "ok"
    assert cell(condition_with(free_memory_bytes=2**29), "desktop", "memory").verdict == "warning"
    assert cell(condition_with(free_disk_bytes=2**29), "desktop", "disk").verdict == "warning"
    assert cell(condition_with(free_disk_bytes=2**20), "desktop", "disk").verdict == "bad"
    fault = "no folder for a run can be made in /proc/x (No such file or directory)."
    found = cell(condition_with(free_disk_bytes=0, folder_fault=fault), "desktop", "disk")
    assert (found.verdict, found.sentence) == ("bad", fault)
    assert found.remedy.endswith('for desktop: folder = "PATH"')


# -- the ways between them


@pytest.mark.parametrize(
    ("tools", "command"),
    [
        ([], "sudo ufw allow from 10.77.0.1"),
        (["ufw", "iptables"], "sudo ufw allow from 10.77.0.1"),
        (
            ["firewall-cmd", "nft"],
            "sudo firewall-cmd --permanent --zone=trusted --add-source=10.77",
        ),
        (["iptables", "nft"], "sudo iptables -I INPUT -s 10.77.0.1 -j ACCEPT"),
        (["nft"], "sudo nft insert rule inet filter input ip saddr 10.77.0.1 accept"),
    ],
)
def test_a_blocked_port(tools: list[str], command: str) -> None:
    hosts = condition_with(firewalls=tools).hosts
    pairs = [pair("laptop", "desktop", Measured(error="timeout")), pair("desktop", "laptop")]
    facts = crew(*hosts, pairs=pairs)
    found = cell(facts, "laptop -> desktop", "port")
    assert (found.verdict, found.text) == ("bad", "blocked")
    assert "a firewall on desktop blocks it" in found.sentence
    assert found.remedy.startswith(f"on desktop: {command}")
    assert cell(facts, "desktop -> laptop", "port").verdict == "ok"
    assert diagnose(facts).verdict == "bad"


def test_a_fixed_port() -> None:
    blocked = pair("laptop", "desktop", replace(FAST, fixed_error="refused"), fixed_port=5000)
    facts = crew(well("laptop"), well("desktop"), pairs=[blocked])
    assert cell(facts, "laptop -> desktop", "port").verdict == "ok"
    found = cell(facts, "laptop -> desktop", "port 5000")
    assert found.verdict == "bad"
    assert found.remedy == "on desktop: sudo ufw allow from 10.77.0.1 to any port 5000 proto tcp"


def test_hosts_on_different_networks() -> None:
    pairs = [pair("laptop", "desktop", Measured(error="no-route"))]
    found = cell(crew(well("laptop"), well("desktop"), pairs=pairs), "laptop -> desktop", "port")
    assert (found.verdict, found.text) == ("bad", "no route")
    assert "ip route get 10.77.0.2" in found.remedy


def test_large_packets_that_are_lost() -> None:
    facts = way_with(large_bytes=0, bytes_per_s=None)
    found = cell(facts, "laptop -> desktop", "large packets")
    assert (found.verdict, found.text) == ("bad", "lost (MTU)")
    assert "1500 on laptop's eth0 and 1500 on desktop's eth0" in found.sentence
    assert "sudo ip link set dev eth0 mtu 1280" in found.remedy
    assert cell(facts, "laptop -> desktop", "bandwidth").verdict == "unknown"


def test_a_slow_link() -> None:
    found = cell(way_with(bytes_per_s=100e6 / 8), "laptop -> desktop", "bandwidth")
    assert (found.verdict, found.text) == ("warning", "100 Mbit/s")
    assert "slow link: 100 Mbit/s" in found.sentence
    assert "takes 8 s" in found.sentence
    assert cell(way_with(bytes_per_s=0.0), "laptop -> desktop", "bandwidth").verdict == "bad"
    assert cell(way_with(latency_s=0.05), "laptop -> desktop", "latency").verdict == "warning"
    assert cell(way_with(bytes_per_s=1e3), "laptop -> desktop", "bandwidth").text == "8 kbit/s"


def test_of_a_slow_link_the_end_is_suspected_that_has_no_fast_one() -> None:
    slow = replace(FAST, bytes_per_s=1e6)
    pairs = [
        pair("laptop", "desktop"), pair("laptop", "server", slow), pair("server", "laptop", slow),
    ]  # fmt: skip
    facts = crew(*map(well, ADDRESSES), pairs=pairs)
    for name in ("laptop -> server", "server -> laptop"):
        assert cell(facts, name, "bandwidth").remedy.startswith("on server: ethtool eth0")


def test_what_was_not_tried_is_unknown() -> None:
    skipped = pair("laptop", "desktop", None, skipped="desktop could not be asked")
    facts = crew(well("laptop"), well("desktop"), pairs=[skipped])
    assert {c.verdict for c in diagnose(facts).pairs[0].cells.values()} == {"unknown"}
    unheard = pair("laptop", "desktop", None, fault="Cannot assign requested address")
    facts = crew(well("laptop"), well("desktop"), pairs=[unheard])
    assert cell(facts, "laptop -> desktop", "port").verdict == "bad"


def test_the_worst_comes_first() -> None:
    names = {"desktop": "127.0.1.1"}
    hosts = condition_with(names=names).hosts
    pairs = [pair("laptop", "desktop", Measured(error="refused"))]
    found = findings(diagnose(crew(*hosts, pairs=pairs)))
    assert [(f.where, f.what) for f in found] == [
        ("laptop -> desktop", "port"),
        ("desktop", "names"),
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_sentences_are_cut_between_words_and_commands_never(is_terminal: bool) -> None:
    """In a file, nothing is."""
    facts = way_with(error="timeout", detail="no answer came")
    (finding,) = findings(diagnose(facts))
    out = io.StringIO()
    show(diagnose(facts), Console(file=out, force_terminal=is_terminal, no_color=True, width=50))
    said = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert finding.cell.remedy in said
    words = finding.cell.sentence.split()
    assert " ".join(words) in " ".join(said.split())
    assert (finding.cell.sentence in said) is not is_terminal
