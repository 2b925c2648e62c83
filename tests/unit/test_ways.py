"""From what was typed and what the environment says to one `Way`, with nothing started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SettingsError
from shoal.rendezvous.ways import Way, find_way, first_count, first_node, variables_of

ENV = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "desktop", "MASTER_PORT": "23456"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123456",
}


def faults(
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    env: dict[str, str] | None = None,
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        find_way(init, rank, world_size, env or {})
    assert caught.value.exit_code == 2
    return caught.value.faults


# -- which way -------------------------------------------------------------------------------------


def test_nothing_set_is_alone() -> None:
    assert find_way(environment={}) == Way()
    assert find_way(environment={}).place == "alone"
    empty = dict.fromkeys([*ENV, *SLURM], "")
    assert find_way(environment=empty) == Way(), "a variable that is empty is not set"


def test_tcp() -> None:
    way = find_way("tcp://192.168.0.1:23456", 1, 2, {})
    assert way == Way(kind="tcp", rank=1, size=2, host="192.168.0.1", port=23456)
    assert way.place == "tcp://192.168.0.1:23456"
    assert find_way("tcp://192.168.0.1:23456/", 1, 2, {}) == way


def test_tcp_by_ipv6_address() -> None:
    way = find_way("tcp://[fd00::2]:23456", 0, 2, {})
    assert (way.host, way.port) == ("fd00::2", 23456)
    assert way.place == "tcp://[fd00::2]:23456"


def test_file() -> None:
    way = find_way("file:///mnt/shared/run1", 1, 2, {})
    assert way == Way(kind="file", rank=1, size=2, path="/mnt/shared/run1")
    assert way.place == "file:///mnt/shared/run1"


@pytest.mark.parametrize("path", ["/mnt/run#2", "/mnt/run?2", "/mnt/a b", "/mnt/50%25"])
def test_a_file_name_is_taken_as_it_is(path: str) -> None:
    """Two runs at `…/run#1` and `…/run#2` used to meet in the same file, `…/run`."""
    assert find_way(f"file://{path}", 0, 2, {}).path == path


def test_environment() -> None:
    expected = Way(kind="tcp", rank=1, size=3, host="desktop", port=23456)
    assert find_way(environment=ENV) == expected
    assert find_way("env://", environment=ENV) == expected
    local = {**ENV, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    way = find_way(environment=local)
    assert (way.local_rank, way.local_size) == (1, 2)


def test_torchrun_hosts_the_store() -> None:
    way = find_way(
        environment={
            **ENV,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert way.store_is_hosted
    assert way.attempt == "2"
    own = find_way(environment={**ENV, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not own.store_is_hosted


def test_slurm() -> None:
    way = find_way(environment=SLURM)
    assert (way.kind, way.rank, way.size, way.host) == ("tcp", 5, 8, "gpu03")
    assert (way.local_rank, way.local_size) == (1, 4)
    assert 1024 < way.port < 32768, "outside the ports that Linux gives to outgoing connections"
    other_rank = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find_way(environment=other_rank).port == way.port
    next_step = {**SLURM, "SLURM_STEP_ID": "1"}
    assert find_way(environment=next_step).port != way.port, "two steps of a job do not meet"


def test_one_rank_speaks_where_the_output_of_several_comes_together() -> None:
    local = {**ENV, "LOCAL_WORLD_SIZE": "2"}
    assert find_way(environment={**local, "LOCAL_RANK": "0"}).speaks
    assert not find_way(environment={**local, "LOCAL_RANK": "1"}).speaks
    assert not find_way(environment=SLURM).speaks
    assert find_way(environment={**SLURM, "SLURM_PROCID": "0"}).speaks
    assert find_way("tcp://desktop:1", 1, 2, {}).speaks, "typed: a terminal of its own"


def test_slurm_with_an_address_of_the_users_own() -> None:
    way = find_way(environment={**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert (way.host, way.port) == ("10.0.0.7", 4000)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("rack1-node[1-2]", "rack1-node1"),
        ("rack[1-2]-node[3,5],x", "rack1-node3"),
        ("login,gpu[03-05]", "login"),
        ("node[1-2].cluster", "node1.cluster"),
        ("", ""),
    ],
)
def test_first_node(nodelist: str, first: str) -> None:
    assert first_node(nodelist) == first


@pytest.mark.parametrize(("text", "count"), [("4(x2),3", 4), ("3", 3), ("2,1", 2), ("", 1)])
def test_first_count(text: str, count: int) -> None:
    assert first_count(text) == count


def test_a_world_of_one_is_alone() -> None:
    assert find_way("tcp://desktop:23456", 0, 1, {}).kind == "alone"
    assert find_way("file:///mnt/run", 0, 1, {}).kind == "alone"
    assert find_way(environment={"RANK": "0", "WORLD_SIZE": "1"}).kind == "alone"
    assert find_way(environment={"WORLD_SIZE": "1"}).kind == "alone"
    assert find_way(world_size=1, environment={}).kind == "alone"
    assert find_way(environment={**ENV, "RANK": "0", "WORLD_SIZE": "1"}).kind == "alone"
    one_task = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert find_way(environment=one_task).kind == "alone"


# -- what comes first ------------------------------------------------------------------------------


def test_typed_before_environment_before_slurm() -> None:
    every = {**SLURM, **ENV, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    typed = find_way("tcp://laptop:1", 0, 2, every)
    assert (typed.host, typed.rank, typed.size) == ("laptop", 0, 2)
    assert not typed.store_is_hosted, "torchrun's agent is not at an address of the user's own"
    assert find_way(environment=every).host == "desktop"
    assert find_way(environment=SLURM).host == "gpu03"


def test_what_is_not_typed_comes_from_the_environment() -> None:
    way = find_way("tcp://laptop:1", environment=ENV)
    assert (way.host, way.rank, way.size) == ("laptop", 1, 3)
    assert find_way(rank=2, environment=ENV).rank == 2
    assert find_way("env://", rank=2, world_size=4, environment=ENV).size == 4


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("tcp://desktop", "tcp://HOST:PORT"),
        ("tcp://:23456", "tcp://HOST:PORT"),
        ("tcp://desktop:0", "tcp://HOST:PORT"),
        ("tcp://desktop:port", "tcp://desktop:port"),
        ("tcp://desktop:70000", "tcp://desktop:70000"),
        ("tcp://[fd00::2:1", "tcp://[fd00::2:1"),
        ("tcp://0.0.0.0:23456", "no address that others can connect to"),
        ("tcp://[::]:23456", "no address that others can connect to"),
        ("tcp://desktop:1?rank=0", "nothing but tcp://HOST:PORT"),
        ("tcp://me@desktop:1", "nothing but tcp://HOST:PORT"),
        ("file://mnt/run", "three slashes"),
        ("file:mnt/run", "three slashes"),
        ("file:///", "three slashes"),
        ("http://desktop:80", "tcp://HOST:PORT, file:///PATH or env://"),
        ("desktop:23456", "tcp://HOST:PORT, file:///PATH or env://"),
        ("", "tcp://HOST:PORT, file:///PATH or env://"),
    ],
)
def test_a_bad_url(init: str, expected: str) -> None:
    found = faults(init, 0, 2)
    assert len(found) == 1
    assert expected in found[0]
    assert f"--init {init}" in found[0], "the fault repeats what was typed"


def test_all_faults_of_a_typed_way_come_together() -> None:
    found = faults("http://desktop")
    assert len(found) == 3
    assert "needs --rank" in found[1]
    assert "needs --world-size" in found[2]
    found = faults("tcp://desktop", env={"RANK": "one", "LOCAL_RANK": "x"})
    assert len(found) == 4
    assert "RANK=one: expected a whole number." in found
    assert "LOCAL_RANK=x: expected a whole number." in found
    assert any("needs --world-size" in fault for fault in found)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (7, 3)])
def test_a_rank_out_of_range(rank: int, size: int) -> None:
    expected = f"--rank {rank}: must be between 0 and {size - 1} (--world-size {size}, counted"
    (typed,) = faults("tcp://desktop:1", rank, size)
    (variables,) = faults(env={**ENV, "RANK": str(rank), "WORLD_SIZE": str(size)})
    (slurm,) = faults(env={**SLURM, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)})
    for fault in (typed, variables, slurm):
        assert fault.startswith(expected)


def test_a_world_without_ranks() -> None:
    assert faults("tcp://desktop:1", 0, 0) == ["--world-size 0: must be at least 1."]
    assert faults(env={**ENV, "WORLD_SIZE": "-2"}) == ["--world-size -2: must be at least 1."]


def test_a_bad_rank_where_the_size_is_not_known() -> None:
    found = faults("tcp://desktop:1", -1)
    assert "--rank -1: must be at least 0." in found


def test_missing_variables_are_named_together() -> None:
    (fault,) = faults(env={"RANK": "1"})
    assert "missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT (given: RANK=1)." in fault
    (fault,) = faults("env://")
    assert "missing: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT." in fault
    (fault,) = faults("env://", rank=0, env={"WORLD_SIZE": "2", "MASTER_PORT": "1"})
    assert "missing: MASTER_ADDR (given: RANK=0, WORLD_SIZE=2, MASTER_PORT=1)." in fault
    (fault,) = faults(rank=0, world_size=2)
    assert "--init tcp://HOST:PORT" in fault, "says how it is done without variables"
    (fault,) = faults(env={"RANK": "3", "WORLD_SIZE": "1"})[:1]
    assert "missing: MASTER_ADDR, MASTER_PORT" in fault


def test_variables_that_are_no_numbers_are_all_named() -> None:
    words = {"RANK": "a", "WORLD_SIZE": "b", "MASTER_ADDR": "h", "MASTER_PORT": "c"}
    found = faults(env={**words, "LOCAL_RANK": "d", "LOCAL_WORLD_SIZE": "e"})
    assert sorted(found) == [
        f"{name}={value}: expected a whole number."
        for name, value in (
            ("LOCAL_RANK", "d"),
            ("LOCAL_WORLD_SIZE", "e"),
            ("MASTER_PORT", "c"),
            ("RANK", "a"),
            ("WORLD_SIZE", "b"),
        )
    ]


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_out_of_range(port: str) -> None:
    expected = [f"MASTER_PORT={port}: a port is between 1 and 65535."]
    assert faults(env={**ENV, "MASTER_PORT": port}) == expected
    assert faults(env={**SLURM, "MASTER_PORT": port}) == expected


def test_an_address_that_is_every_address() -> None:
    (fault,) = faults(env={**ENV, "MASTER_ADDR": "0.0.0.0"})
    assert "MASTER_ADDR: 0.0.0.0 is no address that others can connect to" in fault


def test_slurm_without_a_node() -> None:
    (fault,) = faults(env={**SLURM, "SLURM_STEP_NODELIST": ""})
    assert "MASTER_ADDR" in fault
    (fault,) = faults(env={**SLURM, "SLURM_LOCALID": "x"})
    assert fault == "SLURM_LOCALID=x: expected a whole number."


# -- there and back --------------------------------------------------------------------------------


@given(st.data())
def test_variables_send_a_process_on_the_same_way(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 64), label="size")
    local_size = data.draw(st.integers(1, size), label="local size")
    local_rank = data.draw(st.integers(0, local_size - 1), label="local rank")
    way = Way(
        kind="tcp",
        rank=data.draw(st.integers(0, size - 1), label="rank"),
        size=size,
        host=data.draw(st.sampled_from(["127.0.0.1", "desktop", "fd00::2"]), label="host"),
        port=data.draw(st.integers(1, 65535), label="port"),
        local_rank=local_rank,
        local_size=local_size,
        speaks=local_rank == 0,
    )
    variables = variables_of(way)
    assert find_way(environment=variables) == way
    assert find_way(environment={**SLURM, **variables}) == way
    typed = find_way(way.place, way.rank, way.size, {})
    assert (typed.host, typed.port, typed.place) == (way.host, way.port, way.place)
