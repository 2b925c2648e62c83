"""Scripts that use the crew in ways that go wrong, or could: each ends with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SHOAL, Running

HEAD = "import time, torch, shoal\nfrom torch import nn\n"


def run_script(start, folder: Path, body: str, workers: int = 2) -> Running:
    script = folder / "script.py"
    script.write_text(HEAD + body)
    run = start(*SHOAL, "run", "--workers", str(workers), "--threads", "1", str(script))
    run.end()
    return run


def test_joining_again_and_again(start, tmp_path: Path) -> None:
    """Ranks leave a moment apart: the next meeting once found the last one's store, half closed."""
    run = run_script(
        start,
        tmp_path,
        """
for number in range(5):
    with shoal.join(timeout_s=30) as crew:
        model = crew.replicate(nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        crew.print("joined", number)
        model.close()
""",
    )
    assert run.process.returncode == 0, run.said
    assert [line.split()[-1] for line in run.out.splitlines()] == list("01234")


def test_joining_twice_at_once(start, tmp_path: Path) -> None:
    run = run_script(start, tmp_path, "a = shoal.join(); b = shoal.join()\n")
    assert run.process.returncode == 1
    assert "an earlier shoal.join() that is still open" in run.err


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        ("sync='ring' if crew.rank else 'central'", "do not agree on sync="),
        ("module=nn.Linear(2, 2 + crew.rank)", "weight float32 (2, 2)"),
        ("module=nn.Linear(2, 2, bias=not crew.rank)", "bias float32 (2,)"),
    ],
)
def test_ranks_that_replicate_different_things(
    start, tmp_path: Path, difference: str, sentence: str
) -> None:
    run = run_script(
        start,
        tmp_path,
        f"""
with shoal.join(timeout_s=30) as crew:
    crew.replicate(**{{"module": nn.Linear(2, 2), **dict({difference})}})
""",
    )
    assert run.process.returncode == 1
    assert sentence in run.err
    assert "rank 1" in run.err


def test_a_barrier_that_one_rank_does_not_come_to(start, tmp_path: Path) -> None:
    run = run_script(
        start,
        tmp_path,
        """
with shoal.join(timeout_s=3) as crew:
    if crew.rank == 0:
        crew.barrier()
    else:
        time.sleep(60)
""",
    )
    assert run.process.returncode == 1
    assert "lost rank 1" in run.err
    assert "every rank must take the same number of steps, barriers" in run.err


def test_data_that_is_no_pair(start, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "def triples():\n"
        "    d = [(torch.ones(2), torch.ones(2), torch.tensor(0))] * 8\n"
        "    return d, d\n"
        "def dicts():\n"
        "    d = [{'x': torch.ones(2), 'y': torch.tensor(0)}] * 8\n"
        "    return d, d\n"
    )
    for name, got, *extra in (
        ("triples", "3 parts: Tensor, Tensor, Tensor"),
        ("dicts", "a dict"),
        ("dicts", "a dict", "--verify"),
    ):
        run = start(
            *SHOAL, "train", "--model", "residual-mlp", "--data", f"odd:{name}", *extra,
            "--batch-size", "4", "--threads", "1",
            PYTHONPATH=str(tmp_path),
        )  # fmt: skip
        assert run.end() == 2, run.said
        assert "must be a pair (input, target)" in run.err
        assert got in run.err
        assert "Traceback" not in run.err


def test_functional_dropout_does_not_disturb_the_comparison(start, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch.nn.functional as F\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(1, 1)\n"
        "    def forward(self, x):\n"
        "        return F.dropout(self.layer(x), 0.5, training=self.training)\n"
    )
    run = start(
        *SHOAL, "train", "--workers", "2", "--model", "net:Net", "--data", "sine", "--verify",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert run.end() == 0, run.said
    assert "pass" in run.out
