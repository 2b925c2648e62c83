"""After an agent that was killed, and could tidy up nothing: another one does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.launch.addresses import Site
from shoal.launch.agents import Agents
from shoal.launch.descendants import RUN_VARIABLE
from shoal.launch.loss import Loss
from shoal.launch.messages import Sweep, Swept


def sweep(sites: Sequence[Site], lost: Mapping[str, Loss]) -> list[str]:
    """On all hosts that were lost so. Returns what is to be told of it."""
    names = [name for name, loss in lost.items() if loss.way == "killed"]
    killed = [site for site in sites if site.host.name in names]
    if not killed:
        return []
    with Agents([site.host for site in killed], keep_going=True) as heirs:
        heirs.arrivals()
        orders = {site.host.name: Sweep(run=site.run, folder=site.host.folder) for site in killed}
        swept = heirs.ask_each(orders, Swept)
    return [text for site in killed if (text := _told(site, swept.get(site.host.name)))]


def _told(site: Site, swept: Swept | None) -> str:
    name = site.host.name
    if swept is None:
        look = f"grep -l {RUN_VARIABLE}={site.run} /proc/[0-9]*/environ"
        return (
            f"{name}: what its ranks started in sessions of their own may still run there. To see "
            "it: " + (look if site.is_here else f"ssh {site.host.target} '{look}'")
        )
    if swept.ended:
        return f"{name}: processes that its ranks had left there were ended ({swept.ended})."
    return ""
