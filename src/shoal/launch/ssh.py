"""How a command is run on another host: by the user's own ssh, with its config, agent and keys."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shoal.errors import RunFailed
from shoal.launch.hosts import Host

CONNECT_S = 10
ALIVE_S = 3
MISSED = 3
"""A connection that answers nothing for so many times ALIVE_S is dead."""
VENV = ".local/share/shoal/venv"
"""In a user's home: where `shoal hosts install` puts it."""
SSH_FAILED = 255
"""The exit code of ssh itself, where it did not come through."""
NO_PYTHON, NO_SHOAL, BAD_PYTHON = 96, 97, 98
"""Exit codes where no interpreter there can be used: none exists, none has shoal, none starts."""

# Of an interpreter that does not start, what it said is what helps; one that has no shoal is as it
# should be, and only named. The code that tells of it is one that no failing program has by chance.
_FIND = """
code={no_python}
for python in {candidates}; do
  found=$(command -v "$python" 2>/dev/null) || {{ absent="$absent $python"; continue; }}
  said=$("$found" -c '{ask}' 2>&1 </dev/null)
  status=$?
  case $status in
    0) exec "$found" -m {module} ;;
    {no_shoal}) without="$without $found"; code={no_shoal} ;;
    *) echo "$found ended with exit code $status:" >&2; echo "${{said:-(it said nothing)}}" >&2
       [ $code = {no_shoal} ] || code={bad_python} ;;
  esac
done
[ -z "$without" ] || echo "none of these has shoal:$without" >&2
[ $code != {no_python} ] || echo "no program there:$absent" >&2
exit $code
"""
_ASK = (
    "import importlib.util, sys; "
    f'sys.exit({NO_SHOAL} if importlib.util.find_spec("shoal") is None else 0)'
)


def ssh_argv(host: Host, command: str) -> list[str]:
    """`command` is a line for the shell there. Asks nothing: several hosts at once cannot."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ClearAllForwardings=yes"]
    options += [f"ServerAliveInterval={ALIVE_S}", f"ServerAliveCountMax={MISSED}"]
    # In place of what the user's config may have for logging in by hand, as scp does it.
    options += ["RemoteCommand=none", "PermitLocalCommand=no", *_of_sessions()]
    return ["ssh", "-T", *(part for each in options for part in ("-o", each)), host.target, command]


@cache
def _of_sessions() -> tuple[str, ...]:
    """More of these, for an ssh that knows them: an older one would refuse to start."""
    try:
        said = subprocess.run(["ssh", "-V"], capture_output=True, text=True, timeout=CONNECT_S)
    except (OSError, subprocess.TimeoutExpired):  # whoever starts it next tells of it
        return ()
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said.stderr)
    if found is None or (int(found[1]), int(found[2])) < (8, 7):
        return ()
    return ("SessionType=default", "StdinNull=no", "ForkAfterAuthentication=no")


@contextmanager
def ssh_needed() -> Iterator[None]:
    """Around what starts it."""
    try:
        yield
    except FileNotFoundError as error:
        raise RunFailed(
            "there is no ssh here, by which other hosts are reached. Install it: "
            "sudo apt install openssh-client"
        ) from error


def find_python(host: Host, module: str) -> str:
    """The shell's part: run a module of ours by the first interpreter there that has shoal."""
    if host.python:
        candidates = [_home(host.python)]
    else:
        # What `shoal hosts install` has made comes first: it mends an old shoal anywhere else.
        candidates = [f'"$HOME"/{VENV}/bin/python', shlex.quote(sys.executable)]
        candidates += ["python3", "python"]
    script = _FIND.format(
        candidates=" ".join(candidates), module=module, ask=_ASK,
        no_python=NO_PYTHON, no_shoal=NO_SHOAL, bad_python=BAD_PYTHON,
    )  # fmt: skip
    return f"exec sh -c {shlex.quote(script)}"


def _home(path: str) -> str:
    """A path that may begin with ~, for the shell."""
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
