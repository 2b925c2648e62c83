"""After an agent that was killed or hangs, and can tidy up nothing: another one does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from shoal.launch.agents import Agents, is_this_host
from shoal.launch.descendants import RUN_VARIABLE
from shoal.launch.hosts import Host
from shoal.launch.loss import Loss
from shoal.launch.messages import Sweep, Swept

ARRIVE_S = 20.0
ANSWER_S = 10.0
"""How long that one may take: whoever waits has a run that failed."""


def sweep(
    hosts: Sequence[Host],
    runs: Mapping[str, str],
    lost: Mapping[str, Loss],
    notify: Callable[[str], None],
    *,
    gives_up: bool = False,
) -> list[str]:
    """On all hosts that were lost so; where the connection is, the agent sees it and tidies up.

    runs: the name of the run's part there, by host. notify: is told whom we wait for.
    gives_up: no other agent is sent. Returns what is to be told of it.
    """
    found = [host for host in hosts if _is_left(lost.get(host.name))]
    if not found:
        return []
    swept = {} if gives_up else _sweep(found, runs, lost, notify)
    told = [_told(host, runs[host.name], lost[host.name], swept.get(host.name)) for host in found]
    return [text for text in told if text]


def _sweep(
    hosts: Sequence[Host],
    runs: Mapping[str, str],
    lost: Mapping[str, Loss],
    notify: Callable[[str], None],
) -> dict[str, Swept]:
    names = ", ".join(host.name for host in hosts)
    with suppress(OSError):  # the terminal may be gone
        notify(f"waiting for {names}, to end what is left there. Ctrl-C gives it up.")
    try:
        with Agents(hosts, keep_going=True) as heirs:
            heirs.arrivals(ARRIVE_S)
            orders = {
                host.name: Sweep(
                    run=runs[host.name], folder=host.folder, agent=lost[host.name].agent
                )
                for host in hosts
            }
            return heirs.ask_each(orders, Swept, ANSWER_S)
    finally:
        with suppress(OSError):
            notify("")


def _is_left(loss: Loss | None) -> bool:
    return loss is not None and loss.way in ("killed", "silent", "late")


def _told(host: Host, run: str, loss: Loss, swept: Swept | None) -> str:
    if swept is None:
        command = f"grep -ls {RUN_VARIABLE}={run} /proc/[0-9]*/environ | cut -d/ -f3 | "
        command += "xargs -r kill -9"
        if loss.agent is not None:
            command += f"; kill -9 {loss.agent}"
        return f"{host.name}: processes of this run may be left there. To end them: " + (
            command if is_this_host(host) else f"ssh {host.target} '{command}'"
        )
    left = "1 process" if swept.ended == 1 else f"{swept.ended} processes"
    if loss.agent is not None:
        rest = f", with {left} of this run" if swept.ended else ""
        return f"{host.name}: its agent, which answered no more, was ended there{rest}."
    if swept.ended:
        return f"{host.name}: what was left of this run there was ended: {left}."
    return ""
