"""Scripts that use the crew in ways that go wrong, or could: each ends with a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import SHOAL, Running

TIMES = 5
DIFFERENCES = {
    "sync='ring' if crew.rank else 'central'": "do not agree on sync=",
    "module=nn.Linear(2, 2 + crew.rank)": "weight float32 (2, 2)",
    "module=nn.Linear(2, 2, bias=not crew.rank)": "bias float32 (2,)",
}
"""What the ranks give to replicate(), and what they are told."""

SCRIPT = f"""
import json, time, torch, shoal
from torch import nn

def told(what, call):
    try:
        call()
    except shoal.ShoalError as error:
        print(json.dumps([what, str(error)]), flush=True)

for number in range({TIMES}):
    with shoal.join(timeout_s=30) as crew:
        model = crew.replicate(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        print(json.dumps(["joined", str(number)]), flush=True)
        model.close()

with shoal.join(timeout_s=30) as crew:
    told("twice", shoal.join)
    crew.barrier()

def replicate(difference):
    with shoal.join(timeout_s=30) as crew:
        given = eval(f"dict({{difference}})", globals(), dict(crew=crew))
        crew.replicate(**dict(dict(module=nn.Linear(2, 2)), **given))

def another_call():
    with shoal.join(timeout_s=30) as crew:
        crew.link("dist") if crew.rank else crew.replicate(nn.Linear(2, 2))

told("other calls", another_call)

for difference in {list(DIFFERENCES)}:
    told(difference, lambda: replicate(difference))

with shoal.join(timeout_s=2) as crew:
    if crew.rank == 0:
        crew.barrier()
    else:
        time.sleep(60)
"""


class Story:
    """One run of two ranks, which several tests look at."""

    def __init__(self, run: Running) -> None:
        self.code = run.end()
        self.err = run.err
        self.said = run.said
        self._lines = [line for line in run.out.splitlines() if line.startswith(("[0] [", "[1] ["))]

    def told(self, what: str) -> dict[int, list[str]]:
        """By rank."""
        by_rank: dict[int, list[str]] = {0: [], 1: []}
        for line in self._lines:
            name, text = json.loads(line[4:])
            if name == what:
                by_rank[int(line[1])].append(text)
        return by_rank


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("story")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    run = Running(folder, (*SHOAL, "run", "--workers", "2", "--threads", "1", str(script)))
    try:
        yield Story(run)
    finally:
        run.kill()


def test_joining_again_and_again(story: Story) -> None:
    """Ranks leave a moment apart: the next meeting once found the last one's store, half closed."""
    expected = [str(number) for number in range(TIMES)]
    assert story.told("joined") == {0: expected, 1: expected}, story.said


def test_joining_twice_at_once(story: Story) -> None:
    for rank, texts in story.told("twice").items():
        assert len(texts) == 1, f"rank {rank}: {story.said}"
        assert "an earlier shoal.join() that is still open" in texts[0]


@pytest.mark.parametrize(("difference", "sentence"), DIFFERENCES.items())
def test_ranks_that_replicate_different_things(
    story: Story, difference: str, sentence: str
) -> None:
    """All of them are told."""
    for rank, texts in story.told(difference).items():
        assert len(texts) == 1, f"rank {rank}: {story.said}"
        assert sentence in texts[0]
        assert "rank 1" in texts[0]


def test_ranks_that_make_different_calls(story: Story) -> None:
    for rank, texts in story.told("other calls").items():
        assert len(texts) == 1, f"rank {rank}: {story.said}"
        assert "is at the exchange of" in texts[0]
        assert "every rank must make the same calls" in texts[0]


def test_a_barrier_that_one_rank_does_not_come_to(story: Story) -> None:
    assert story.code == 1, story.said
    assert "lost rank 1" in story.err
    assert "every rank must take the same number of steps, barriers" in story.err


def test_data_that_is_no_pair(start_warm, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "def triples():\n"
        "    d = [(torch.ones(2), torch.ones(2), torch.tensor(0))] * 8\n"
        "    return d, d\n"
        "def dicts():\n"
        "    d = [{'x': torch.ones(2), 'y': torch.tensor(0)}] * 8\n"
        "    return d, d\n"
    )
    runs = {
        (got, *extra): start_warm(
            *SHOAL, "train", "--model", "residual-mlp", "--data", f"odd:{name}", *extra,
            "--batch-size", "4", "--threads", "1",
            PYTHONPATH=str(tmp_path),
        )
        for name, got, *extra in (
            ("triples", "3 parts: Tensor, Tensor, Tensor"),
            ("dicts", "a dict"),
            ("dicts", "a dict", "--verify"),
        )
    }  # fmt: skip
    for (got, *_), run in runs.items():
        assert run.end() == 2, run.said
        assert "must be a pair (input, target)" in run.err
        assert got in run.err
        assert "Traceback" not in run.err


CAUGHT = """
import os, sys, time, torch, shoal
try:
    with shoal.join(timeout_s=30) as crew:
        crew.barrier()
        if crew.rank == 1:
            raise ValueError("my fault")
        try:
            crew.barrier()
        except shoal.PeerLost:
            if sys.argv[1] == "hidden":
                raise RuntimeError("no more of this") from None
            raise
except shoal.PeerLost:
    sys.exit(3)
finally:
    while os.environ["RANK"] == "1" and os.path.exists(f"/proc/{crew.roster[0].pid}/fd/1"):
        time.sleep(0.01)  # it is the last to end
"""


@pytest.mark.parametrize("way", ["hidden", "exit"])
def test_whoever_made_something_of_a_lost_peer_is_not_to_blame(
    start_warm, tmp_path: Path, way: str
) -> None:
    """Even if nothing that it says tells of the peer."""
    script = tmp_path / "caught.py"
    script.write_text(CAUGHT)
    run = start_warm(*SHOAL, "run", "--workers", "2", "--out", str(tmp_path), str(script), way)
    assert run.end() == 1, run.said
    assert "shoal: rank 1 (" in run.err
    assert "ValueError: my fault" in run.err
    assert "no more of this" not in run.err


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_ended_well_and_is_waited_for_is_named(start, tmp_path: Path, absent) -> None:
    """Once; and the others wait as long as they are told to."""
    script = tmp_path / "absent.py"
    script.write_text(
        f"import os, shoal\nif os.environ['RANK'] != '{absent}': shoal.join(timeout_s=6)"
    )
    run = start(*SHOAL, "run", str(script))
    assert run.end() == 1, run.said
    assert run.err.count("has ended with exit code 0") == 1, run.said
    assert f"shoal: rank {absent} (" in run.err
    assert f"and rank {1 - absent} still waits to meet it" in run.err


FROZEN = """
import os, signal, shoal
with shoal.join(timeout_s=2) as crew:
    crew.barrier()  # all have joined
    if crew.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    crew.agree("what is asked for", 1)
"""


def test_a_leader_that_is_frozen_is_named(start_warm, tmp_path: Path) -> None:
    """It holds the store by which ranks tell each other things: all others waited for ever."""
    script = tmp_path / "script.py"
    script.write_text(FROZEN)
    run = start_warm(*SHOAL, "run", "--workers", "2", str(script))
    assert run.end() == 1, run.said
    assert "lost rank 0" in run.err
    assert "is frozen" in run.err
