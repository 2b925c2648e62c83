"""`shoal doctor` on one machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from processes import SHOAL, Running

import shoal
from shoal.launch.fingerprint import fingerprint

Start = Callable[..., Running]


def test_one_machine(start: Start) -> None:
    running = start(*SHOAL, "doctor", "--json")
    assert running.end() in (0, 1), running.err
    found = json.loads(running.out)
    (host,), (way,) = found["hosts"], found["pairs"]
    assert running.end() == (found["verdict"] == "bad")
    assert host["cells"]["ssh"] == {"verdict": "ok", "text": "here", "sentence": "", "remedy": ""}
    assert host["cells"]["shoal"]["text"] == shoal.__version__
    assert abs(host["facts"]["clock"]["offset_s"]) < 1
    assert "127.0.0.1" in host["facts"]["condition"]["addresses"]["lo"]
    assert host["facts"]["hello"]["cores"] >= 1
    assert (way["source"], way["target"]) == (host["name"], host["name"])
    assert way["facts"]["address"] == "127.0.0.1"
    assert way["facts"]["measured"]["error"] == ""
    assert way["facts"]["measured"]["large_bytes"] == 65536
    assert way["facts"]["measured"]["bytes_per_s"] > 10e6


def test_tables_fit_into_a_terminal(start: Start) -> None:
    running = start(*SHOAL, "doctor", COLUMNS="80")
    assert running.end() in (0, 1), running.err
    lines = running.out.splitlines()
    assert lines[0].split()[:4] == ["host", "ssh", "python", "torch"]
    tables = [line for line in lines if not line.startswith((" ", "!", "✗"))]
    assert max(map(len, tables)) <= 80
    assert any(line.split()[:2] == ["from", "to"] for line in lines)


def test_a_port_that_cannot_be(start: Start) -> None:
    running = start(*SHOAL, "doctor", "--port", "0")
    assert running.end() == 2
    assert "--port 0: a port is between 1 and 65535" in running.err


def test_code_that_is_on_all_hosts(start: Start, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "net.py").write_text("x = 1")
    running = start("env", "-C", str(project), *SHOAL, "doctor", "--json", "--no-sync")
    assert running.end() in (0, 1), running.err
    cell = json.loads(running.out)["hosts"][0]["cells"]["code"]
    assert (cell["verdict"], cell["text"]) == ("ok", fingerprint(project)[:8])
