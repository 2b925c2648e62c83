"""Everything that shoal raises on purpose.

ShoalError
 ├── SettingsError     what the user asked for cannot be done; every fault at once
 ├── MeetingError      the ranks did not come together
 ├── KeyFileError      a key file is missing, open to others or not what it claims to be
 ├── DataError         a data file is missing, cut short or not what it claims to be
 ├── StorageError      the run folder cannot be written
 ├── ModelError        a model cannot be cut into stages; every fault at once
 ├── SyncError         replicas cannot be kept equal (they differ, or a sync was misused)
 ├── WireError         a message cannot be sent, or what came is not a message
 │    └── OutOfStepError    ranks make different calls: nobody is lost, and each waits for others
 ├── PeerLost          another rank died, froze or left
 │    └── PeerSilent   ... and will never answer: killed, frozen or cut off
 ├── WorkerError       something went wrong on a worker, which is still there
 └── RunFailed         a rank that we started ended badly
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_FAILED = 1
"""The run did not succeed; also where ranks do not fit together, as each by itself may be right."""
EXIT_USAGE = 2
"""The run never began: the settings are at fault."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells count it (128 + SIGINT)."""


class ShoalError(Exception):
    """The root. The message is written for the person at the terminal."""

    exit_code = EXIT_FAILED


class SettingsError(ShoalError):
    """One or more settings are at fault. Raised before anything is started."""

    exit_code = EXIT_USAGE

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(f"- {fault}" for fault in self.faults))


class MeetingError(ShoalError):
    """The ranks did not come together."""


class KeyFileError(ShoalError):
    """A key file is missing, open to others, in the way, or not what it claims to be."""

    exit_code = EXIT_USAGE


class DataError(ShoalError):
    """A data file is missing, cut short, or not what it claims to be."""

    exit_code = EXIT_USAGE


class StorageError(ShoalError):
    """The run folder cannot be written."""


class ModelError(ShoalError):
    """A model cannot be cut into stages, or not so. Raised before anything moves."""

    exit_code = EXIT_USAGE

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__(
            self.faults[0]
            if len(self.faults) == 1
            else "\n".join(f"- {fault}" for fault in self.faults)
        )


class SyncError(ShoalError):
    """Replicas cannot be kept equal: they differ, or a sync was misused."""


class WireError(ShoalError):
    """A message cannot be sent, or what came is not a message."""


class OutOfStepError(WireError):
    """Ranks make different calls of what all must call alike. A cause, not a consequence."""


class PeerLost(ShoalError):
    """Another rank died, froze or left. A consequence, never the cause of a failed run."""


class PeerSilent(PeerLost):
    """Killed, frozen or cut off: it will never answer, and to wait for it is in vain."""


class WorkerError(ShoalError):
    """Something went wrong on a worker, which is still there and can be used."""

    def __init__(self, worker: str, kind: str, text: str, remote_traceback: str) -> None:
        self.worker = worker
        self.kind = kind
        """The name of the exception's class there."""
        self.text = text
        self.remote_traceback = remote_traceback
        head = f"{worker}: {kind}: {text}" if text else f"{worker}: {kind}"
        super().__init__(f"{head}\n\nThere:\n{remote_traceback.rstrip()}")


class RunFailed(ShoalError):
    """A rank that we started ended badly."""


def lost_peer(error: BaseException | None) -> PeerLost | None:
    """The loss of a peer that an error is, or that it was made of: raised from it, or while it was
    handled."""
    passed: set[int] = set()
    while error is not None and id(error) not in passed:  # an error can be raised from itself
        if isinstance(error, OutOfStepError):
            return None
        if isinstance(error, PeerLost):
            return error
        passed.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def reason_of(error: BaseException) -> str:
    """Why a block was left, for those who wait for whoever left it."""
    if isinstance(error, SystemExit) and not error.code:
        return "sys.exit()"
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name
