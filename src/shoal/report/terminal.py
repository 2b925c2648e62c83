"""What a person sees: a progress bar, a line per epoch, a closing summary, failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from shoal.closing import Closing
from shoal.report import events
from shoal.report.records import EpochRecord, Summary
from shoal.report.stage_table import stage_lines
from shoal.report.waiting import waiting_line

HEADER = "  epoch   train loss   train acc   test acc   seconds   samples/s"


class Terminal(Closing):
    """Renders events.

    With `as_json`, standard output carries the summary and nothing else. With `quiet`, only
    failures are shown: another rank speaks for all. `out` stands for standard output.
    """

    def __init__(
        self, as_json: bool = False, quiet: bool = False, out: IO[str] | None = None
    ) -> None:
        self._as_json = as_json
        self._quiet = quiet
        self._out = out
        self._console = _console(stderr=as_json)
        self._waiting = waiting_line(self._console.file)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self.verdict: events.Verified | None = None
        self._folder: str | None = None

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.Verified):
            self.verdict = event
        if self._quiet and not isinstance(event, events.Failed):
            return
        match event:
            case events.Waiting(text=text):
                self._waiting(text)
            case events.Started():
                self._started(event)
            case events.Progress():
                self._progress(event)
            case events.EpochDone(record=record, epochs=epochs):
                self._hide_bar()
                self._console.print(epoch_line(record, epochs))
            case events.Finished(summary=summary):
                self._finished(summary)
            case events.Verified():
                self._verified(event)
            case events.Failed():
                self.failure(failure_text(event), event.traceback)

    def log(self, who: str, text: str) -> None:
        """A line that a rank printed."""
        self._console.print(Text(f"[{who}] {text}"))

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def failure(self, text: str, traceback: str = "") -> None:
        """An error, on standard error, after whatever else was shown."""
        self.close()
        err = _console(stderr=True)
        if traceback:
            err.print(Text(traceback.rstrip()))
        first, _, rest = text.partition("\n")
        err.print(Text.assemble(("shoal: ", "bold red"), (first, "bold")))
        if rest:
            err.print(Text(rest))

    def interrupted(self) -> None:
        """And what there is of the run, if it had begun."""
        self.failure("interrupted.")
        if self._folder is not None:
            said = f"shoal: what there is of this run is in {self._folder}"
            _console(stderr=True).print(Text(said))

    def _started(self, event: events.Started) -> None:
        self._folder = event.folder
        hosts = sorted(set(event.hosts))
        where = f" on {', '.join(hosts)}" if len(hosts) > 1 else ""
        layout = _layout(event, len(event.hosts) // event.stages)
        self._console.print(
            Text.assemble(
                (event.model, "bold"),
                f" ({event.parameters:,} parameters) on ",
                (event.data, "bold"),
                f" ({event.train_samples:,} train, {event.test_samples:,} test)",
            )
        )
        first = f"{layout}{where}"
        rest = f"global batch {event.batch_size} · {_threads(event.threads)} each"
        fits = len(first) + len(rest) + 3 <= self._console.width or not self._console.is_terminal
        self._console.print(f"{first}{' · ' if fits else chr(10)}{rest}\n")
        self._console.print(Text(HEADER, style="dim"))

    def _progress(self, event: events.Progress) -> None:
        if not self._console.is_terminal:
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("  {task.description}"),
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=event.steps, state="")
            self._bar.start()
        assert self._task is not None
        state = f"loss {_number(event.loss)}"
        if event.accuracy is not None:
            state += f"  accuracy {event.accuracy:.4f}"
        self._bar.update(
            self._task,
            description=f"epoch {event.epoch}/{event.epochs}",
            completed=event.step,
            total=event.steps,
            state=state,
        )

    def _finished(self, summary: Summary) -> None:
        self._hide_bar()
        if self._as_json:
            self._print_json(summary)
            return
        self._console.print()
        width = self._console.width if self._console.is_terminal else None
        result, *rest = summary_lines(summary, width)
        self._console.print(Text(result, style="bold"))
        for line in rest:
            self._console.print(line)

    def _print_json(self, value: msgspec.Struct) -> None:
        out = self._out or sys.stdout
        out.write(msgspec.json.encode(value).decode() + "\n")
        out.flush()

    def _verified(self, event: events.Verified) -> None:
        self._hide_bar()
        if self._as_json:
            self._print_json(event)
            return
        difference = event.largest_difference
        style = "bold green" if event.passed else "bold red"
        self._console.print(
            f"{_layout(event, event.replicas)}, against one process: "
            f"{event.steps} step{'s' if event.steps > 1 else ''} on the same global batches, "
            f"{event.dtype}."
        )
        for note in event.notes:
            self._console.print(f"({note})")
        self._console.print(
            f"largest difference of any parameter: "
            f"{'not a number' if difference is None else f'{difference:.2e}'} in {event.parameter}"
            f" (tolerance {event.tolerance:.0e})"
        )
        self._console.print(Text("pass" if event.passed else "fail", style=style))

    def _hide_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        self._waiting("")
        self._hide_bar()


@contextmanager
def own_stdout(reserve: bool) -> Iterator[IO[str]]:
    """Standard output; with `reserve`, for the caller alone.

    What others print meanwhile (a user's model, native code, a child) goes to standard error.
    """
    if not reserve:
        yield sys.stdout
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            yield out
        finally:
            sys.stdout.flush()
            out.flush()
            os.dup2(out.fileno(), 1)


def _console(stderr: bool) -> Console:
    """Plain: square brackets and colons in a name are the user's own, not markup."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


def failure_text(event: events.Failed) -> str:
    if event.is_consequence:
        return event.message  # it says itself who lost whom
    if event.traceback:
        return f"rank {event.rank} ({event.host}) failed with the {event.kind} above."
    return f"rank {event.rank} ({event.host}): {event.message}"


def epoch_line(record: EpochRecord, epochs: int) -> str:
    return (
        f"{f'{record.epoch}/{epochs}':>7}{_number(record.train_loss):>13}"
        f"{_number(record.train_accuracy):>12}{_number(record.test_accuracy):>11}"
        f"{record.seconds:>10.1f}{record.samples_per_second:>12,.0f}"
    )


def summary_lines(summary: Summary, width: int | None = None) -> list[str]:
    """width: what the terminal has; None: whatever it takes."""
    last = summary.epochs[-1]
    seconds = sum(e.seconds for e in summary.epochs)
    result = (
        f"test accuracy {last.test_accuracy:.4f}"
        if last.test_accuracy is not None
        else f"test loss {_number(last.test_loss)}"
    )
    rate = sum(e.samples_per_second * e.seconds for e in summary.epochs) / seconds
    lines = [
        f"{result} after {len(summary.epochs)} epoch{'s' if len(summary.epochs) > 1 else ''}, "
        f"{seconds:.1f} s of training, {rate:,.0f} samples/s"
    ]
    if summary.layout.replicas > 1:
        lines.append(f"{decimal(last.bytes_sent)} of gradients sent per epoch, all ranks together")
    lines += stage_lines(summary.stages, width)
    if last.train_loss is None:
        lines.append("the loss is not a finite number any more: try a smaller --lr")
    if summary.folder is not None:
        lines.append(f"kept in {summary.folder}")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _threads(of_ranks: list[int]) -> str:
    least, most = min(of_ranks), max(of_ranks)
    return f"{least if least == most else f'{least} to {most}'} thread{'s' if most > 1 else ''}"


def _layout(event: events.Started | events.Verified, replicas: int) -> str:
    """How the model lies over the ranks, in words."""
    over = "" if event.transport == "dist" else f" over {event.transport}"
    parts = "" if event.microbatches == 1 else f" × {event.microbatches} micro-batches"
    if isinstance(event, events.Started) and event.boss:
        workers = f"{event.stages} worker{'s' * (event.stages > 1)}"
        return f"a boss and {workers}, one stage each{over}, {event.schedule}{parts}"
    if event.stages == 1:
        way = f"sync {event.sync}{over}"
        return "1 process" if replicas == 1 else f"{replicas} replicas, {way}"
    stages = f"{event.stages} stages{over}, {event.schedule}{parts}"
    return stages if replicas == 1 else f"{replicas} replicas (sync {event.sync}) of {stages}"
