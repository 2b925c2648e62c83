"""How a command is run on another host: by the user's own ssh, with its config, agent and keys."""

from __future__ import annotations

import shlex
import sys

from shoal.launch.hosts import Host

CONNECT_S = 10
ALIVE_S = 3
MISSED = 3
"""A connection that answers nothing for so many times ALIVE_S is dead."""
VENV = ".local/share/shoal/venv"
"""In a user's home: where `shoal hosts install` puts it."""
NO_SHOAL = 97
"""The exit code where no interpreter there has shoal."""

_FIND = """
for python in {candidates}; do
  found=$(command -v "$python" 2>/dev/null) || continue
  seen="$seen $found"
  "$found" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("shoal") is None)' \
    2>/dev/null && exec "$found" -m {module}
done
echo "none of these has shoal:$seen" >&2
exit {code}
"""


def ssh_argv(host: Host, command: str) -> list[str]:
    """`command` is a line for the shell there. Asks nothing: several hosts at once cannot."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ClearAllForwardings=yes"]
    options += [f"ServerAliveInterval={ALIVE_S}", f"ServerAliveCountMax={MISSED}"]
    return ["ssh", "-T", *(part for each in options for part in ("-o", each)), host.target, command]


def find_python(host: Host, module: str) -> str:
    """The shell's part: run a module of ours by the first interpreter there that has shoal."""
    if host.python:
        candidates = [_home(host.python)]
    else:
        candidates = [shlex.quote(sys.executable)]
        candidates += [f'"$HOME"/{VENV}/bin/python', "python3", "python"]
    script = _FIND.format(candidates=" ".join(candidates), module=module, code=NO_SHOAL)
    return f"exec sh -c {shlex.quote(script)}"


def _home(path: str) -> str:
    """A path that may begin with ~, for the shell."""
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
