"""Histories of calls on one small directory and one register, and whether they are linearizable.

A history is linearizable if every call can be given one moment between its begin and its end so
that the model, called in that order, answers the same. The search is Wing and Gong's, with Lowe's
memory of what was tried: the calls done so far and the state they lead to. A call whose outcome
nobody knows (its client died, or was told EIO) may have happened at any later moment, or never.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

UNKNOWN: Final = "unknown"  # the answer of a call that nobody got
OK: Final = "ok"

Answer: TypeAlias = int | str
"""An inode or value, OK, UNKNOWN, or the name of an errno."""


class State(NamedTuple):
    """Which inode each name leads to (sorted), and what the register holds."""

    names: tuple[tuple[str, int], ...] = ()
    value: str = ""


EMPTY: Final = State()


@dataclass(frozen=True)
class Call:
    """One call, and what came of it. `end` is infinite where nobody knows."""

    client: int
    verb: str
    arguments: tuple[str, ...]
    begin: float
    end: float
    answer: Answer
    made: int = 0  # the inode of a create, known beforehand or not at all

    def __str__(self) -> str:
        words = " ".join((self.verb, *self.arguments))
        return f"[{self.begin:.6f} {self.end:.6f}] client {self.client}: {words} -> {self.answer}"


def apply(state: State, call: Call) -> list[tuple[Answer, State]]:
    """What the model answers to `call`, and the state after it."""
    names = dict(state.names)
    first = names.get(call.arguments[0]) if call.arguments else None
    if call.verb == "get":
        return [(state.value, state)]
    if call.verb == "put":
        return [(OK, state._replace(value=call.arguments[0]))]
    if call.verb == "create":
        if first is not None:
            return [(errno.errorcode[errno.EEXIST], state)]
        names[call.arguments[0]] = call.made
        return [(call.made, _with(state, names))]
    if first is None:
        return [(errno.errorcode[errno.ENOENT], state)]
    if call.verb == "lookup":
        return [(first, state)]
    if call.verb == "unlink":
        del names[call.arguments[0]]
        return [(OK, _with(state, names))]
    return [_renamed(state, names, call)]


def _renamed(state: State, names: dict[str, int], call: Call) -> tuple[Answer, State]:
    source, target = call.arguments
    if call.verb == "noreplace":
        if target in names:
            return errno.errorcode[errno.EEXIST], state
    elif call.verb == "exchange":
        if target not in names:
            return errno.errorcode[errno.ENOENT], state
        names[source], names[target] = names[target], names[source]
        return OK, _with(state, names)
    else:
        assert call.verb == "rename", call
    ino = names.pop(source)
    names[target] = ino
    return OK, _with(state, names)


def _with(state: State, names: dict[str, int]) -> State:
    return state._replace(names=tuple(sorted(names.items())))


def linearize(calls: Sequence[Call], begin: State = EMPTY) -> list[Call] | None:
    """An order that explains `calls`, or None where there is none."""
    ordered = sorted(calls, key=lambda call: call.begin)
    everything = frozenset(range(len(ordered)))
    tried: set[tuple[frozenset[int], State]] = set()
    path: list[int] = []

    def search(left: frozenset[int], state: State) -> bool:
        if all(ordered[index].answer == UNKNOWN for index in left):
            return True
        if (left, state) in tried:
            return False
        tried.add((left, state))
        first_end = min(ordered[index].end for index in left)
        for index in sorted(left):
            call = ordered[index]
            if call.begin > first_end:
                break  # something else has ended before this one began
            for answer, after in apply(state, call):
                if call.answer in (UNKNOWN, answer):
                    path.append(index)
                    if search(left - {index}, after):
                        return True
                    path.pop()
            if call.answer == UNKNOWN:
                continue  # it may also happen later, or never: nobody waits for it
        return False

    return [ordered[index] for index in path] if search(everything, begin) else None


def require_linearizable(calls: Sequence[Call], begin: State = EMPTY) -> None:
    """Fails with the history where no order explains it."""
    if linearize(calls, begin) is None:
        ordered = sorted(calls, key=lambda call: call.begin)
        raise AssertionError("no order explains\n" + "\n".join(map(str, ordered)))
