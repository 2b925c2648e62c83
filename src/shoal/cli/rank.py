"""What `shoal train` starts as each rank: `python -m shoal.cli.rank EVENTS_FD ORDER`.

Nothing is printed here: what there is to say goes to the launcher as events.
"""

from __future__ import annotations

import sys

import msgspec

from shoal.cli.boss_rank import run_boss
from shoal.cli.ending import exit_now
from shoal.cli.order import RankOrder
from shoal.network import interface_with
from shoal.report.events import pipe_emitter
from shoal.train.rank import run_rank


def main(events_fd: str, encoded_order: str) -> int:
    order = msgspec.json.decode(encoded_order, type=RankOrder)
    emit = pipe_emitter(int(events_fd))
    if order.boss_port:
        code = run_boss(order.settings, order.boss_port, emit)
    else:
        code = run_rank(order.settings, order.way, _interface(order), emit)
    if code != 0:
        exit_now(code)
    return code


def _interface(order: RankOrder) -> str | None:
    """An address that this host does not have stays: as the name of none, it is told of."""
    if order.interface or not order.address:
        return order.interface
    return interface_with(order.address) or order.address


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
