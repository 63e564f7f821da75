"""Kill or upgrade the client of a supervised mount while programs use it."""

from __future__ import annotations

import random
import time
from typing import Final

from tests.faults.program import Volume, slicefs
from tests.fsclient.survival.programs import PROGRAMS
from tests.fsclient.survival.supervised import Programs, Supervised

LOAD_S: Final = (1.1, 2.0)  # between two kills; a client that dies sooner counts as broken
KILLED_AGAIN: Final = 0.25  # how often the next client is killed while it takes over
EXPECTED: Final = "slicefs.supervisor process .* ended with signal 9|git|Redis answers again"


def killing(
    volume: Volume,
    kills: int,
    seed: int,
    *options: str,
    names: tuple[str, ...] = tuple(PROGRAMS),
    upgrades: bool = False,
) -> None:
    """Programs on one mount, whose client is killed so often, or upgraded."""
    chance = random.Random(seed)
    volume.format()
    supervised = Supervised(volume, *options)
    programs = Programs(volume.base, supervised.path, names, seed)
    pauses = []
    try:
        programs.await_set_up()
        for _ in range(kills):
            time.sleep(chance.uniform(*LOAD_S))
            programs.require_running()
            begun = time.monotonic()
            if upgrades:
                done = slicefs("upgrade", supervised.path)
                assert done.code == 0, done
            else:
                supervised.kill()
                if chance.random() < KILLED_AGAIN:
                    supervised.kill_next(chance.uniform(0, 1))
            supervised.await_next()
            pauses.append(time.monotonic() - begun)
        time.sleep(LOAD_S[0])
        finished = programs.end()
        supervised.mount.umount()
        shown = " ".join(f"{each:.1f}" for each in sorted(pauses))
        print(f"seed {seed}, pauses {shown} s, done {finished}")
        volume.end(EXPECTED)
    except BaseException:
        print(volume.log.read_text())  # its directory goes with the test
        raise
    finally:
        programs.abandon()
        supervised.clean_up()
