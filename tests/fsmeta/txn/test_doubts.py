"""M6: a commit whose answer was lost stays in doubt until its fate is known, and is made once."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from fsmeta.errors import Ambiguous, Fenced, StoreFull, Voided
from fsmeta.meta.locks import Range
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions import session as sessions
from fsmeta.ops.sessions.lock import LockOutcome
from fsmeta.schema import keys
from fsmeta.schema.locks import Kind
from fsmeta.store.contract import FENCE_FIELD, Applied, Commit
from fsmeta.types import AT_END, ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice, SliceId
from tests.fsmeta.engines import Engine

ROOT = ROOT_CALLER
SHORT_S = 0.05  # how long a verb tries where it is to give up
Sink = Callable[[Commit], Applied | None]


class Line:
    """What is between a client and its store, which loses commits that match and their repeats."""

    def __init__(self, meta: Meta) -> None:
        self.commits: Sink = meta.store.commit
        self.lost: list[Commit] = []  # of each the first try
        self.arrives = True  # only answers are lost
        self.cut = False
        self.meanwhile: Callable[[], object] = bool  # what happens after a loss
        meta.store.commit = self._commit  # type: ignore[method-assign]

    def _commit(self, commit: Commit) -> Applied | None:
        if not self.cut or not commit.writes:
            return self.commits(commit)
        first = all(each.sequence != commit.sequence for each in self.lost)
        if first:
            self.lost.append(commit)
            if self.arrives:
                self.commits(commit)
            self.meanwhile()
        raise Ambiguous("cut")


def _create(meta: Meta) -> Ino:
    return meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino


def _piece(meta: Meta, length: int = 10) -> Slice:
    return Slice(0, meta.new_slice_id(), length, 0, length)


def _chunk(meta: Meta, ino: Ino) -> list[Slice]:
    """What the store has by now."""
    meta.forget_chunks([ino])
    return meta.read_chunk(ino, 0)


def _impatient(engine: Engine) -> tuple[Meta, Line]:
    meta = engine.meta(deadline_s=SHORT_S)
    return meta, Line(meta)


def _patient(meta: Meta) -> None:
    meta.transactor._deadline_s = 60.0


def _in_doubt(meta: Meta, line: Line, ino: Ino, batch: list[tuple[int, Slice]]) -> None:
    """A commit whose answer does not come."""
    line.cut = True
    with pytest.raises(Ambiguous):
        meta.write_slices(ino, batch, 10, 1)
    line.cut = False
    _patient(meta)


def _delete(meta: Meta) -> list[SliceId]:
    """A deletion round; what it has found to be nobody's."""
    assert meta.session is not None
    assert meta.deletion.take_lead()
    number = meta.deletion.next_round()
    assert number is not None
    noted = meta.deletion.dead_slices(10)
    uses = meta.deletion.last_uses(number, noted)
    assert uses is not None
    meta.deletion.forget_dead(noted, uses.shared)
    return [each for each, _ in uses.gone]


@pytest.mark.parametrize("index", [0, AT_END])
def test_what_was_deleted_meanwhile_is_not_listed_again(engine: Engine, index: int) -> None:
    """Another mount truncates the file, and a round deletes the slice."""
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    piece = _piece(one)
    _in_doubt(one, line, ino, [(index, piece)])
    two.setattr(ROOT, ino, SetAttr(size=0))
    assert _delete(two) == [piece.id]
    assert one.write_slices(ino, [(index, piece)], 10, 1).after.size == 0
    assert not _chunk(two, ino)
    assert two.getattr(ROOT, ino).size == 0


def test_what_was_compacted_meanwhile_is_not_listed_again(engine: Engine) -> None:
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    first, more = _piece(one), _piece(one)
    _in_doubt(one, line, ino, [(AT_END, first)])
    compact = _piece(two)
    assert two.compact_chunk(ino, 0, _chunk(two, ino), [compact])
    assert _delete(two) == [first.id]
    after = one.write_slices(ino, [(AT_END, first), (AT_END, more)], 10, 2).after
    assert after.size == 20, "what came behind the one in doubt is committed with it"
    assert _chunk(two, ino) == [compact, more._replace(pos=10)]


def test_what_did_not_arrive_is_committed_and_never_comes_late(engine: Engine) -> None:
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    piece = _piece(one)
    line.arrives = False
    _in_doubt(one, line, ino, [(AT_END, piece)])
    # a client of TiKV knows that it has no such record yet, but for what it has been in doubt about
    late = engine.open().commit if engine.name == "tikv" else line.commits
    one.settle_doubts()
    assert late(line.lost[0]) is None, "a repeat of what is settled"
    assert two.getattr(ROOT, ino).size == 0
    assert one.write_slices(ino, [(AT_END, piece)], 10, 1).after.size == 10
    late(line.lost[0])
    assert _chunk(two, ino) == [piece]


@pytest.mark.parametrize("arrives", [True, False])
def test_an_append_is_made_once_though_its_session_was_ended(engine: Engine, arrives: bool) -> None:
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    piece = _piece(one)
    line.arrives = arrives
    _in_doubt(one, line, ino, [(AT_END, piece)])
    assert one.session is not None
    two.sessions.end(one.session.id)
    one.sessions.open({}, one.session.id)
    assert one.write_slices(ino, [(AT_END, piece)], 10, 1).after.size == 10
    assert _chunk(two, ino) == [piece]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_repeat_that_is_fenced_does_not_hide_what_was_done(engine: Engine, arrives: bool) -> None:
    """Others end the session between the first try and the second."""
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    piece, sid = _piece(one), one.session
    assert sid is not None
    _patient(one)

    def meanwhile() -> None:
        two.sessions.end(sid.id)
        line.cut = False

    line.cut, line.arrives, line.meanwhile = True, arrives, meanwhile
    if arrives:
        assert one.write_slices(ino, [(AT_END, piece)], 10, 1).after.size == 10
    else:
        with pytest.raises(Fenced):
            one.write_slices(ino, [(AT_END, piece)], 10, 1)
    one.sessions.open({}, sid.id)
    if not arrives:
        one.write_slices(ino, [(AT_END, piece)], 10, 1)
    assert _chunk(two, ino) == [piece]


def test_names_that_were_made_are_no_error_though_the_session_was_ended(engine: Engine) -> None:
    """ESTALE has the kernel ask again, which would find what the first try has made."""
    (one, line), two = _impatient(engine), engine.meta()
    sid = one.session
    assert sid is not None
    _patient(one)
    _create(one)  # which takes numbers for inodes

    def meanwhile() -> None:
        two.sessions.end(sid.id)
        line.cut = False

    line.cut, line.meanwhile = True, meanwhile
    made = one.create(ROOT, ROOT_INO, b"d", 0o40755)
    assert two.lookup(ROOT, ROOT_INO, b"d").ino == made.ino


def test_a_lock_that_went_with_its_session_is_not_had(engine: Engine) -> None:
    """The client has joined anew before it asks what became of the commit."""
    (one, line), two = _impatient(engine), engine.meta()
    sid, ino = one.session, _create(two)
    assert sid is not None
    _patient(one)

    def meanwhile() -> None:
        line.cut = False
        two.sessions.end(sid.id)
        one.sessions.open({}, sid.id)

    line.cut, line.meanwhile = True, meanwhile
    with pytest.raises(Fenced):
        one.locks.setlk(ino, Kind.FLOCK, 1, Range(True))
    assert two.locks.setlk(ino, Kind.FLOCK, 1, Range(True)).outcome is LockOutcome.GRANTED
    two.locks.unlock(ino, Kind.FLOCK, 1)


def test_a_repeat_that_finds_no_room_does_not_hide_what_was_done(engine: Engine) -> None:
    """A full Redis takes no script, though it has run the same one before."""
    one, line = _impatient(engine)
    _patient(one)
    one.new_ino()
    inner = line.commits

    def full(commit: Commit) -> Applied | None:
        if commit.sequence == line.lost[0].sequence:
            raise StoreFull("no memory")
        return inner(commit)

    def meanwhile() -> None:
        line.cut, line.commits = False, full

    line.cut, line.meanwhile = True, meanwhile
    assert one.create(ROOT, ROOT_INO, b"f", 0o100644).nlink == 1


def test_a_fate_that_is_forgotten_is_an_error(engine: Engine) -> None:
    """It is neither done again nor taken for done."""
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    piece, sid = _piece(one), one.session
    _in_doubt(one, line, ino, [(AT_END, piece)])
    assert sid is not None
    two.sessions.end(sid.id)
    two.transactor.run(lambda txn: sessions.forget_ended(txn, sid.id))
    with pytest.raises(Voided, match="not known any more"):
        one.write_slices(ino, [(AT_END, piece)], 10, 1)
    one.settle_doubts()
    with pytest.raises(Voided, match="not known any more"):
        one.write_slices(ino, [(AT_END, piece)], 10, 1)
    one.give_up_slices([piece.id])
    one.settle_doubts()
    assert one.slices.floor(1 << 40) > piece.id


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_question_that_is_lost_too_leaves_it_in_doubt(
    engine: Engine, arrives: bool, done: bool
) -> None:
    """The answer is that of a commit, so it is as safe: `--redis-wait`."""
    (one, line), two = _impatient(engine), engine.meta()
    ino = _create(two)
    piece = _piece(one)
    line.arrives = done
    _in_doubt(one, line, ino, [(AT_END, piece)])
    one.transactor._deadline_s = SHORT_S
    line.cut, line.arrives = True, arrives
    with pytest.raises(Ambiguous):
        one.write_slices(ino, [(AT_END, piece)], 10, 1)
    assert two.getattr(ROOT, ino).size == 10 * done
    line.cut = False
    _patient(one)
    assert one.write_slices(ino, [(AT_END, piece)], 10, 1).after.size == 10
    assert _chunk(two, ino) == [piece]


def test_floors_rise_once_doubts_are_settled(engine: Engine) -> None:
    """As those of a compaction, which nobody offers again."""
    one, line = _impatient(engine)
    ino = _create(one)
    old = _piece(one)
    one.write_slices(ino, [(0, old)], 10, 1)
    new = _piece(one)
    line.cut = True
    with pytest.raises(Ambiguous):
        one.compact_chunk(ino, 0, [old], [new])
    one.give_up_slices([new.id])
    line.cut = False
    _patient(one)
    assert one.slices.floor(1 << 40) == new.id
    one.settle_doubts()
    assert one.slices.floor(1 << 40) > new.id
    assert _chunk(one, ino) == [new]


def test_what_an_ended_session_did_is_kept_until_its_client_is_back(engine: Engine) -> None:
    one, two = engine.meta(), engine.meta()
    ino = _create(one)
    assert one.session is not None
    row, ended = keys.session_row(one.session.id), keys.pack_u64(one.session.id)
    two.sessions.end(one.session.id)
    left = two.store.read_rows([row])[0]
    assert left
    assert all(field[:1] == b"w" for field in left), "and lets it commit nothing"
    assert two.store.read([(keys.ENDED, ended)]) != [None]
    with pytest.raises(Fenced):
        one.setattr(ROOT, ino, SetAttr(size=5))
    one.sessions.open({}, one.session.id)
    assert two.store.read_rows([row]) == [{}]
    assert two.store.read([(keys.ENDED, ended)]) == [None]


def test_a_session_that_holds_very_much_can_be_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is looked at no more; the rest of it goes with the row."""
    monkeypatch.setattr(sessions, "TIDIED_MAX", 1)
    one, two = engine.meta(), engine.meta()
    sid = one.session
    assert sid is not None
    inos = [one.create(ROOT, ROOT_INO, b"f%d" % n, 0o100644).ino for n in range(3)]
    for number in range(3):
        one.unlink(ROOT, ROOT_INO, b"f%d" % number)
    assert len(one.deletion.hold_orphans(inos)) == 3
    two.sessions.end(sid.id)
    row = keys.session_row(sid.id)
    left = [field[:1] for field in two.store.read_rows([row])[0]]
    assert FENCE_FIELD not in left
    assert 2 <= left.count(b"h") <= 3
    one.sessions.open({}, sid.id)
    assert two.store.read_rows([row]) == [{}]


def test_leaving_whose_answer_was_lost_is_no_error(engine: Engine) -> None:
    """The session's row is gone, and with it what became of the commit."""
    one, line = _impatient(engine)
    _patient(one)
    _create(one)

    def meanwhile() -> None:
        line.cut = False

    line.cut, line.meanwhile = True, meanwhile
    one.sessions.close()
    assert not engine.meta().sessions.all()[1:]


def test_a_join_whose_answer_was_lost_is_made_again(engine: Engine) -> None:
    """The proof that one rejoins by is there for the second try."""
    (one, line), two = _impatient(engine), engine.meta()
    _patient(one)
    _create(one)
    assert one.session is not None
    two.sessions.end(one.session.id)

    def meanwhile() -> None:
        line.cut = False

    line.cut, line.meanwhile = True, meanwhile
    record = one.sessions.open({}, one.session.id)
    assert two.store.read([(keys.session_row(record.id), FENCE_FIELD)]) != [None]
    with pytest.raises(OSError, match=r"\[Errno 17\]") as caught:
        _create(one)
    assert caught.value.errno == errno.EEXIST
