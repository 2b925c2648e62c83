"""What a training run is asked to do, and every fault that can be seen in it without starting.

Pure, but for three look-ups that belong to the user's machine and not to a run: where the cache
is, where keys are kept, and how many cores this process may use.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

SYNCS = ("all-reduce", "central", "ring", "serial-ring", "ddp")
LINK_SYNCS = ("ring", "serial-ring")
"""Those that go from rank to rank, and so over any transport."""
TRANSPORTS = ("dist", "zmq")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("sequential", "gpipe", "1f1b")
DEVICES = ("auto", "cpu", "cuda")
MAX_TIMEOUT_S = 1e9
"""Thirty years. Clocks inside torch count nanoseconds and overflow at ten times that."""
MAX_NAME_BYTES = 200
"""A folder's name has at most 255, and ours begins with the time."""


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run. Resolved once, stored with the run as settings.json."""

    model: str = "mnist-cnn"
    """A name from the zoo, or the user's own `package.module:factory`."""
    data: str = "mnist-sample"
    """A name from the catalogue, or `package.module:factory` returning (train, test)."""
    data_dir: str | None = None
    """Where the data files are, instead of the cache."""
    sync: str = "all-reduce"
    """How replicas are kept equal."""
    transport: str = "dist"
    """What carries messages from rank to rank."""
    stages: int = 1
    """Into how many the model is cut. More ranks than that are further replicas."""
    boss: bool = False
    """One process drives the stages, each on a worker."""
    schedule: str | None = None
    """In which order stages work on micro-batches; None where there is one stage."""
    microbatches: int = 1
    """Into how many a replica's batch is cut."""
    cuts: list[str] | None = None
    """Modules that stages 1, 2, ... begin with. None: by a short profile."""
    key: str | None = None
    """The secret key's file, for zmq between machines. Default: the one of `shoal keygen`."""
    authorized_keys: str | None = None
    """The file of public keys that this host trusts. Default: beside the key of `shoal keygen`."""
    insecure: bool = False
    """Let zmq go between machines without keys."""
    batch_size: int = 128
    """Samples in a *global* batch, shared out over the replicas."""
    epochs: int = 5
    """Passes over the training set."""
    optimizer: str = "sgd"
    """Which torch optimizer."""
    lr: float = 0.05
    """Learning rate."""
    momentum: float = 0.9
    """Momentum of sgd; the other optimizers do not use it."""
    seed: int = 0
    """Decides the initial weights and, with the epoch, the order of the samples."""
    device: str = "auto"
    """cuda where there is one and it is asked for; this host's own business."""
    threads: int | None = None
    """Compute threads of each process. Default: cores / processes on this host."""
    out: str = "runs"
    """The folder that run folders are made in."""
    folder: str | None = None
    """The run folder itself, where whoever started the ranks has made it."""
    name: str | None = None
    """The last part of the run folder's name. Default: the model's name."""
    log_every: int = 10
    """Steps between two lines of metrics.jsonl."""
    verify: bool = False
    """Do not train: compare a few steps with one process."""
    timeout_s: float = 300.0
    """The longest wait for another rank, when meeting and in any step."""
    debug: bool = False
    """Show tracebacks of shoal's own errors too."""


CONFIG_VARIABLE = "SHOAL_CONFIG"
"""Names the folder of keys, where a run has keys of its own."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
PIPE_VARIABLE = "SHOAL_EVENTS"
"""Where a rank finds its pipe to the launcher: descriptor and inode, since what the rank starts
inherits the variable, and may have something else at that number."""
LOCAL_FIELDS = frozenset(
    {
        "authorized_keys",
        "data_dir",
        "debug",
        "device",
        "folder",
        "key",
        "name",
        "out",
        "threads",
        "timeout_s",
    }
)
"""Settings that each host may choose for itself. All others must be equal on every rank."""


def shared_settings(settings: TrainSettings) -> dict[str, str]:
    """What every rank must agree on, as text, to be compared by name when the crew meets."""
    values = msgspec.structs.asdict(settings)
    cuts = values.pop("cuts")
    values["cut"] = None if cuts is None else ", ".join(cuts)
    shared = {k: v for k, v in values.items() if k not in LOCAL_FIELDS}
    return {k: "unset" if v is None else str(v) for k, v in shared.items()}


def faults(settings: TrainSettings, num_ranks: int) -> list[str]:
    """Every fault that is visible in the values alone."""
    s = settings
    found = _stage_faults(s, num_ranks)
    num_replicas = max(1, num_ranks // max(1, s.stages))
    if 1 <= s.batch_size < num_replicas:
        found.append(
            f"--batch-size {s.batch_size}: the global batch is shared out over {num_replicas} "
            f"{'ranks' if s.stages == 1 else 'replicas'}, so it must be at least {num_replicas}."
        )
    for option, value in (
        ("--epochs", s.epochs),
        ("--log-every", s.log_every),
        ("--threads", s.threads),
        ("--batch-size", s.batch_size),
    ):
        if value is not None and value < 1:
            found.append(f"{option} {value}: must be at least 1.")
    if not (0 < s.lr < float("inf")):
        found.append(f"--lr {s.lr}: must be a positive number.")
    if not 0 <= s.momentum < 1:
        found.append(f"--momentum {s.momentum}: must be at least 0 and below 1.")
    if not 0 <= s.seed < 2**63:
        found.append(f"--seed {s.seed}: must be between 0 and 2**63 - 1.")
    if not (0 < s.timeout_s <= MAX_TIMEOUT_S):
        found.append(
            f"--timeout {s.timeout_s}: must be a positive number of seconds, {MAX_TIMEOUT_S:g} at "
            "most."
        )
    found += unknown("--sync", s.sync, SYNCS)
    found += unknown("--transport", s.transport, TRANSPORTS)
    if s.stages == 1:  # else zmq is for the stages, and syncs may use what they like
        found += link_faults(s.sync, s.transport == "zmq")
    found += unknown("--optimizer", s.optimizer, OPTIMIZERS)
    found += unknown("--device", s.device, DEVICES)
    if s.name is not None and (not s.name or s.name in (".", "..") or "/" in s.name):
        found.append(f"--name {s.name!r}: is part of a folder's name, so no '/' and not empty.")
    elif s.name is not None and len(os.fsencode(s.name)) > MAX_NAME_BYTES:
        found.append(
            f"--name {s.name!r}: is part of a folder's name, so {MAX_NAME_BYTES} bytes at most; "
            f"got {len(os.fsencode(s.name))}."
        )
    for field, value in msgspec.structs.asdict(s).items():
        # Bytes of the command line that are no UTF-8 come as lone surrogates; JSON has none.
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            found.append(f"--{field.replace('_', '-')} {value!a}: is not UTF-8 text.")
    return found


def _stage_faults(s: TrainSettings, num_ranks: int) -> list[str]:
    if s.boss:
        given = {
            "--verify": s.verify,
            "--schedule": s.schedule not in (None, "gpipe"),
        }
        return [f"{o}: is not for --boss." for o, is_given in given.items() if is_given] + (
            stage_faults(s.stages, s.stages, "gpipe", s.microbatches, s.cuts)
        )
    if s.stages != 1:
        not_given = "" if s.stages > 1 else SCHEDULES[-1]  # which nobody chose for no stages
        schedule = s.schedule or not_given
        return stage_faults(s.stages, num_ranks, schedule, s.microbatches, s.cuts)
    given = {
        "--schedule": s.schedule is not None,
        "--microbatches": s.microbatches != 1,
        "--cut": s.cuts is not None,
    }
    return [
        f"{option}: is about stages, and there is one. Add --stages 2."
        for option, is_given in given.items()
        if is_given
    ]


_OPTIONS = ("--stages", "--schedule", "--microbatches", "--cut")
ARGUMENTS = ("stages=", "schedule=", "microbatches=", "cuts=")
"""The same in a script."""


def stage_faults(
    stages: int,
    num_ranks: int,
    schedule: str,
    microbatches: int,
    cuts: Sequence[str] | None,
    words: Sequence[str] = _OPTIONS,
) -> list[str]:
    """Every fault in how a model is cut and scheduled. words: what the user calls these."""
    of_stages, of_schedule, of_microbatches, of_cuts = words
    found = []
    if stages < 1:  # so that nothing can be said of ranks and cuts, but of all else
        found.append(f"{told(of_stages, stages)}: must be at least 1.")
    elif left := num_ranks % stages:
        fits = [str(n) for n in (num_ranks - left, num_ranks - left + stages) if n]
        found.append(
            f"{told(of_stages, stages)}: {num_ranks} ranks do not make whole replicas of {stages} "
            f"stages; {left} would be left over. Use {' or '.join(fits)} ranks."
        )
    found += unknown(of_schedule, schedule, SCHEDULES)
    if microbatches < 1:
        found.append(f"{told(of_microbatches, microbatches)}: must be at least 1.")
    if cuts is not None and stages >= 1 and len(cuts) != stages - 1:
        found.append(
            f"{of_cuts}: it takes {counted(stages - 1, 'cut')} to make {counted(stages, 'stage')}; "
            f"{len(cuts)} given ({', '.join(cuts) or 'none'})."
        )
    return found


def default_microbatches(schedule: str, stages: int) -> int:
    return 1 if schedule == "sequential" else 2 * stages


def microbatches_made(settings: TrainSettings, num_replicas: int) -> int:
    """Of a replica's full batch: each has a sample at least."""
    return min(settings.microbatches, -(-settings.batch_size // num_replicas))


def whole_batch_note(option: str, schedule: str | None, microbatches: int) -> str:
    """What is to be said where micro-batches are asked for and the batch is taken whole."""
    if schedule != "sequential" or microbatches <= 1:
        return ""
    return f"{told(option, microbatches)}: sequential takes the batch whole, so there is one."


def link_faults(sync: str, has_link: bool, option: str = "--sync") -> list[str]:
    """A fault where a sync would not use the link it is given."""
    if not has_link or sync in LINK_SYNCS:
        return []
    return [
        f"{told(option, sync)}: is a collective of torch.distributed's and goes over no other "
        f"transport. Over zmq go: {', '.join(LINK_SYNCS)}."
    ]


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def kind_of(value: object) -> str:
    """What it is, in a sentence: `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def told(option: str, value: object) -> str:
    """As the user has written it: `--sync ring` on a command line, `sync='ring'` in a script."""
    return f"{option}{value!r}" if option.endswith("=") else f"{option} {value}"


def unknown(option: str, value: str, known: Iterable[str]) -> list[str]:
    """A fault if `value` is none of `known`, with the nearest names first."""
    known = list(known)
    if value in known:
        return []
    return [f"{told(option, value)}: unknown.{near(value, known)} Known: {', '.join(known)}."]


def near(value: object, known: Iterable[str], sign: str = "") -> str:
    """The names that are most like it, as a question; nothing, if none is."""
    found = difflib.get_close_matches(str(value).lower(), known, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(each + sign for each in found)}?" if found else ""


def cache_dir() -> Path:
    """Where downloaded data is kept between runs."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def _user_folder(variable: str, usual: str) -> Path:
    """The user's own, for shoal. A relative path there counts for nothing, as XDG has it."""
    base = Path(os.environ.get(variable) or "")
    return (base if base.is_absolute() else Path.home() / usual) / "shoal"


def config_folder() -> Path:
    """Where keys are kept: what the user gave to shoal once, for all runs; or for this one."""
    if own := os.environ.get(CONFIG_VARIABLE):
        return Path(own)
    return _user_folder("XDG_CONFIG_HOME", ".config")


def usable_cores() -> int:
    """Cores this process may run on, which in a container is not what the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(num_processes: int) -> int:
    """Compute threads for each of `num_processes` on this host, so that together they fit."""
    return max(1, usable_cores() // max(1, num_processes))


def threads_in_environment() -> str | None:
    """What the user has told all programs of compute threads, if anything."""
    return os.environ.get(THREADS_VARIABLE) or None


def pipe_in_environment() -> str:
    """What `PIPE_VARIABLE` says, in a rank and in all that it starts."""
    return os.environ.get(PIPE_VARIABLE, "")


def boss_in_environment() -> str:
    """HOST:PORT of a boss, where the environment names one."""
    host, port = os.environ.get("MODEL_HOST"), os.environ.get("MODEL_PORT", "1024")
    return f"{host}:{port}" if host else ""
