"""W2: what a mount holds back is published many changes at a time; who is refused, is so alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.writeback import publisher
from fsmeta.errors import Ambiguous
from fsmeta.store.contract import Applied, Commit
from tests.conftest import LogWatch
from tests.posix.inproc import RUNTIME, memory, sqlite
from tests.posix.writeback.test_writeback import Pair, new_pair, read, wait_until, write

FILES = 40


@pytest.fixture(params=["mem", "sqlite"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    connect = memory() if request.param == "mem" else sqlite(tmp_path / "meta.db")
    with new_pair(connect, tmp_path / "staging") as made:
        yield made


def _publisher(pair: Pair) -> publisher.Publisher:
    assert pair.mine.writeback is not None
    return pair.mine.writeback._publisher


class Held:
    """Files that could be published, were it not for the first; counts commits from then on."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        pair.hold()
        wait_until(lambda: bool(pair.gate.asked))
        self._first = pair.gate.open
        pair.gate.open = RUNTIME.event()
        pair.gate.open.set()
        self._begun = 0
        self.inos: list[int] = []

    def fill(self) -> None:
        pair = self._pair
        for number in range(FILES):
            write(pair.me, b"/d/%02d" % number, b"%d" % number)
            self.inos.append(pair.me.stat(b"/d/%02d" % number).ino)
        assert pair.mine.writeback is not None
        objects = pair.mine.writeback.objects
        wait_until(lambda: objects.left()[0] == 1)
        self._begun = _publisher(pair)._run.counters.commits

    def publish(self) -> int:
        """How many commits that takes."""
        self._first.set()
        self._pair.release()
        return _publisher(self._pair)._run.counters.commits - self._begun

    def require(self, *but: int) -> None:
        """All are there, but those."""
        for number in set(range(FILES)).difference(but):
            for posix in (self._pair.me, self._pair.them):
                assert read(posix, b"/d/%02d" % number) == b"%d" % number


def test_w2_many_changes_are_one_commit(pair: Pair) -> None:
    held = Held(pair)
    held.fill()
    assert held.publish() <= 2
    held.require()
    assert _publisher(pair).published == 1 + 2 * FILES


def test_w2_who_is_refused_is_refused_alone(pair: Pair, log_watch: LogWatch) -> None:
    """Others have taken two of the names: all other files are published, in few commits."""
    log_watch.expect(
        "^WARNING fsclient.writeback.publisher: create (17|30): .*; it is in /lost.found/"
    )
    held = Held(pair)
    held.fill()
    for name in (17, 30):
        pair.them.symlink(b"theirs", b"/d/%d" % name)
    commits = held.publish()
    held.require(17, 30)
    for number in (17, 30):
        rescued = b"/lost+found/%d.%d" % (number, held.inos[number])
        assert read(pair.them, rescued) == b"%d" % number
        assert pair.me.stat(b"/d/%d" % number).ino != held.inos[number]
    assert _publisher(pair).conflicts == 2
    assert commits < FILES / 2, "after each refusal they are to go together again"


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for-good"])
def test_w2_lost_answers_do_nothing_twice(pair: Pair, for_good: bool, log_watch: LogWatch) -> None:
    """The commit of many is applied, and its answer lost; also for so long that nobody asks on."""
    log_watch.expect("^WARNING fsclient.writeback.publisher: .* waits to be published: ")
    held = Held(pair)
    held.fill()
    run = _publisher(pair)._run
    whole = run.store.commit
    lost: list[int] = []

    def lose(commit: Commit) -> Applied | None:
        answer = whole(commit)
        if not lost and len(commit.writes) > FILES:
            lost.append(commit.sequence)
            raise Ambiguous("simulated: the answer is lost")
        return answer

    run.store.commit = lose  # type: ignore[method-assign]
    run._deadline_s = -1.0 if for_good else 10.0
    held.publish()
    assert lost
    held.require()
    assert len(pair.them.listdir(b"/d")) == 1 + FILES
