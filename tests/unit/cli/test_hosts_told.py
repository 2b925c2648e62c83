"""What the user is told of a run on hosts, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import hosts_run
from shoal.cli.hosts_worker import _keys
from shoal.errors import RunFailed
from shoal.launch.hosts import Host
from shoal.launch.on_hosts import Watcher
from shoal.report import events
from shoal.report.records import EpochRecord, LayoutRecord, Summary
from shoal.report.terminal import Terminal
from shoal.settings import TrainSettings

FINISHED = events.Finished(
    summary=Summary(
        model="net",
        data="few",
        seed=0,
        batch_size=2,
        sync="ring",
        transport="dist",
        schedule=None,
        layout=LayoutRecord(replicas=1, stages=1),
        hosts=["desktop"],
        parameters=3,
        epochs=[
            EpochRecord(
                epoch=1, train_loss=1.0, train_accuracy=None, test_loss=1.0, test_accuracy=None,
                seconds=1.0, samples_per_second=1.0, bytes_sent=0,
            )
        ],
        folder="/there",
        shoal="0",
        torch="2",
    )
)  # fmt: skip


def test_nothing_is_said_to_be_kept_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The leader is done, and what it left cannot be copied."""

    def cannot_fetch(
        hosts: object, folder: object, tasks: object, watcher: Watcher, **more: object
    ) -> None:
        watcher.on_event(0, events.encode(FINISHED))
        raise RunFailed("no room for it")

    monkeypatch.setattr(hosts_run, "run_on_hosts", cannot_fetch)
    settings = TrainSettings(out=str(tmp_path))
    with Terminal() as terminal, pytest.raises(RunFailed):
        hosts_run.train_on_hosts([Host(name="desktop")], settings, terminal, sync=True)
    assert "kept in" not in capsys.readouterr().out


def test_workers_without_keys_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with _keys(True) as (files, words):
        assert (files, words) == ({}, ["--insecure"])
    said = capsys.readouterr().err
    assert said.startswith("shoal: --insecure: these workers have no keys")
    assert "insecure=True" in said
