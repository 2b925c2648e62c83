"""A progress bar for downloads, which appears with the first byte and not before."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn

from shoal.closing import Closing


class DownloadBar(Closing):
    """On standard error; a line per file."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, file: str, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = Progress(
                "downloading {task.description}",
                BarColumn(bar_width=32),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
        if file not in self._tasks:
            self._tasks[file] = self._bar.add_task(file, total=total)
        self._bar.update(self._tasks[file], completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
