"""shoal on a host that has none: the very code that runs here, in a venv of its own, or for the
interpreter that hosts.toml gives."""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from shoal.errors import RunFailed
from shoal.launch.hosts import Host
from shoal.launch.local import die_with_parent
from shoal.launch.loss import Loss, ssh_remedy, torch_index
from shoal.launch.ssh import SSH_FAILED, VENV, ssh_argv, ssh_needed
from shoal.version import VERSION

_WHEEL = "Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# Whoever asks for it has its end of the pipe open for as long as it wants it: pip may be silent for
# minutes, and would not notice. A wheel of the same version counts as installed already, though its
# files may be others, or broken: hence the second time.
_INSTALL = """
set -e
venv="$HOME/$1" own="$2" size="$3" wheel="$4"
shift 4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT PIPE TERM
head -c "$size" > "$work/shoal.tar.gz"
exec 3<&0 </dev/null
{ cat >/dev/null; kill 0; } <&3 >/dev/null 2>&1 &
trap 'rm -rf "$work"; kill $! 2>/dev/null || :' EXIT
exec 3<&-
if [ -z "$own" ]; then
for python in python3.13 python3.12 python3.11 python3; do
  found=$(command -v $python 2>/dev/null) || continue
  "$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && break
  found=
done
[ -n "$found" ] || { echo "there is no python of 3.11 or later: install one" >&2; exit 1; }
"$found" -m venv "$venv" || { echo "venv is missing: apt install python3-venv" >&2; exit 1; }
own="$venv/bin/python"
fi
case $own in "~/"*) own="$HOME/${own#"~/"}" ;; esac
cd "$work"
tar -xzf shoal.tar.gz
"$own" -m pip install --disable-pip-version-check -c constraints.txt "$@" "$wheel"
"$own" -m pip install --disable-pip-version-check --no-index --no-deps --force-reinstall "$wheel"
"""


def install(hosts: Sequence[Host], pip: Sequence[str], tell: Callable[[str], None]) -> None:
    """On each, one after the other: what pip says there is told. Raises with all that failed.

    pip: more words for it, for example where torch is to come from.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as name:
        folder = Path(name)
        wheel = make_wheel(folder)
        torch = importlib.metadata.version("torch")
        (folder / "constraints.txt").write_text(f"torch=={torch.partition('+')[0]}\n")
        index = torch_index(torch)
        if index and not any("index" in word for word in pip):
            pip = ["--extra-index-url", index, *pip]  # pip prefers a version with a label
        archive = folder / "shoal.tar.gz"
        with tarfile.open(archive, "w:gz") as packed:
            for file in (wheel, folder / "constraints.txt"):
                packed.add(file, file.name)
        failed = [_install(host, archive, f"./{wheel.name}", pip, tell) for host in hosts]
    if losses := [loss.text for loss in failed if loss is not None]:
        raise RunFailed("\n".join(losses))


def make_wheel(folder: Path) -> Path:
    """Of the package as it lies here, however it was installed; needs no network and no source."""
    own = importlib.metadata.distribution("shoal")
    info = f"shoal-{VERSION}.dist-info"
    path = folder / f"shoal-{VERSION}-py3-none-any.whl"
    package = Path(__file__).parents[1]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(package.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                wheel.write(file, f"shoal/{file.relative_to(package)}")
        wheel.writestr(f"{info}/METADATA", own.read_text("METADATA") or "")
        wheel.writestr(f"{info}/entry_points.txt", own.read_text("entry_points.txt") or "")
        wheel.writestr(f"{info}/WHEEL", _WHEEL)
        names = [*wheel.namelist(), f"{info}/RECORD"]
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return path


def _install(
    host: Host, archive: Path, wheel: str, pip: Sequence[str], tell: Callable[[str], None]
) -> Loss | None:
    packed = archive.read_bytes()
    words = [VENV, host.python or "", str(len(packed)), wheel, *pip]
    with ssh_needed():
        process = subprocess.Popen(
            ssh_argv(host, f"exec {shlex.join(['sh', '-c', _INSTALL, 'shoal', *words])}"),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(),
        )
    try:
        last = _told(process, packed, f"[{host.name}] ", tell)
        code = process.wait()
    finally:
        process.kill()  # after Ctrl-C, and so what it runs there
    if code == 0:
        return None
    said = f"\n  {last}" if last else ""
    if code == SSH_FAILED:
        return Loss(host.name, f"ssh {host.target} failed.", said, ssh_remedy(said, host))
    return Loss(host.name, "shoal could not be installed.", said, _remedy(last))


def _told(
    process: subprocess.Popen[bytes], packed: bytes, head: str, tell: Callable[[str], None]
) -> str:
    """All that it says, which gets this first; the last line of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    last = ""
    with process.stdin, process.stdout:  # the former until the end: that is what it looks for
        with suppress(BrokenPipeError):  # it says why
            process.stdin.write(packed)
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            last = text.strip() or last
            tell(f"{head}{text}")
    return last


def _remedy(last: str) -> str:
    """For the last line that pip said."""
    if "No matching distribution found" not in last:
        return ""
    return (
        "Does it reach the index of packages from there? If another one does: --pip '--index-url "
        "URL'. Without a network, from a folder on that host: --pip '--no-index --find-links DIR'."
    )
