"""Of several hosts' tracebacks, only the one that the others follow from is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import until

from shoal.launch.hosts import Host
from shoal.launch.messages import RankTask
from shoal.launch.on_hosts import Watcher, run_on_hosts
from shoal.launch.outcome import RankEnd

LOSE = "raise RuntimeError('Connection closed by peer')"
AFTER_IT = """
import os, sys, time
while not os.path.exists(sys.argv[1]) or os.path.exists("/proc/" + open(sys.argv[1]).read()):
    time.sleep(0.01)
raise ValueError("my fault")
"""
FIRST = f"""
import os, sys
with open(sys.argv[1] + "new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, sys.argv[1])
{LOSE}
"""


def run(
    folder: Path, tasks: list[RankTask], on_line: Callable[[Host, int, str, str], None]
) -> RankEnd | None:
    (folder / "run").mkdir()
    return run_on_hosts(
        [Host(name="localhost"), Host(name="127.0.0.1")],
        folder / "run",
        lambda sites, ways: tasks,
        Watcher(on_line),
        project=folder,
        sync=False,
        threads=1,
    )


@pytest.mark.parametrize(
    ("other", "cause", "shown", "kept"),
    [
        (AFTER_IT, 1, "ValueError: my fault", "closed by peer"),
        ("", 0, "closed by peer", ""),
    ],
)
def test_only_the_cause_is_shown_wherever_it_is(
    tmp_path: Path, other: str, cause: int, shown: str, kept: str
) -> None:
    """The other host's is in its log; one that follows from nothing is shown, after a while."""
    seen: list[str] = []
    words = [["-c", code, str(tmp_path / "pid")] for code in (FIRST, other)]
    tasks = [RankTask(rank=n, arguments=each, environment={}) for n, each in enumerate(words)]
    end = run(tmp_path, tasks, lambda host, rank, stream, text: seen.append(text))
    assert end is not None
    assert end.rank == cause
    assert sum("Traceback" in text for text in seen) == 1
    assert shown in seen[-1]
    assert kept in (tmp_path / "run/logs/rank0.log").read_text()


ALIKE = """
import os, sys
from pathlib import Path
here = Path(sys.argv[1])
(here / str(os.getpid())).touch()
while len(list(here.iterdir())) < 2:
    pass
raise ValueError("all alike")
"""


def test_of_hosts_that_all_fail_alike_one_is_shown(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    seen: list[tuple[int, str]] = []

    def on_line(host: Host, rank: int, stream: str, text: str) -> None:
        """No faster than the other host, which so comes to tell of its own."""
        until(lambda: not any(Path("/proc", pid.name).exists() for pid in here.iterdir()), "ended")
        seen.append((rank, text))

    words = ["-c", ALIKE, str(here)]
    tasks = [RankTask(rank=n, arguments=words, environment={}) for n in range(2)]
    end = run(tmp_path, tasks, on_line)
    assert end is not None
    assert [rank for rank, text in seen if "Traceback" in text] == [end.rank]
    assert seen[-1] == (end.rank, "ValueError: all alike")
