"""What `shoal train` starts as each rank: `python -m shoal.cli.rank ORDER`.

Nothing is printed here: what there is to say goes to the launcher as events.
"""

from __future__ import annotations

import sys

import msgspec

from shoal.cli.boss_rank import run_boss
from shoal.cli.ending import exit_now
from shoal.cli.order import RankOrder
from shoal.report.events import launcher_emitter
from shoal.train.rank import run_rank


def main(encoded_order: str) -> int:
    order = msgspec.json.decode(encoded_order, type=RankOrder)
    emit = launcher_emitter()
    assert emit is not None, "a launcher starts this"
    if order.boss_port:
        code = run_boss(order.settings, order.boss_port, emit)
    else:
        code = run_rank(order.settings, order.way, order.interface, emit)
    if code != 0:
        exit_now(code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
