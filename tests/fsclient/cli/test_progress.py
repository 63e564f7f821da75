"""C6: what commands show at a terminal while they work: a line, drawn anew, that leaves nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.load import content
from tests.faults.program import COMMAND_S, SLICEFS, Volume, needs_mounts, slicefs

COLUMNS = 50
FILES = 20
MIB = 1 << 20


class Seen(NamedTuple):
    """What a command did at a terminal."""

    code: int
    out: str  # through a pipe
    frames: list[str]  # what the line was, each time it was drawn
    screen: list[str]  # what stays: lines of standard error


def at_terminal(*words: str | Path, columns: int = COLUMNS) -> Seen:
    """Run `slicefs` with a terminal for its standard error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    said = bytearray()

    def listen() -> None:
        try:
            while part := os.read(ours, 4096):
                said.extend(part)
        except OSError:
            pass  # EIO: nobody has the other end any more

    process = subprocess.Popen(
        [SLICEFS, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    listener = threading.Thread(target=listen)
    listener.start()
    out, _ = process.communicate(timeout=COMMAND_S)
    listener.join()
    os.close(ours)
    return Seen(process.returncode, out, *drawn(said.decode(), columns))


def drawn(said: str, columns: int) -> tuple[list[str], list[str]]:
    """What a terminal makes of it: every state of the last line, and what is there at the end."""
    frames: list[str] = []
    screen = [""]
    for word in re.findall(r"\r\x1b\[K|\r\n|[^\r\n\x1b]+|.", said):
        if word == "\r\x1b[K":
            assert len(screen[-1]) < columns, "it is wrapped, and can't be taken back"
            screen[-1] = ""
        elif word == "\r\n":
            screen.append("")
        else:
            assert word.isprintable(), repr(word)
            screen[-1] += word
            frames.append(screen[-1])
    return frames, screen


@pytest.fixture
def volume(base: Path) -> Iterator[Volume]:
    made = Volume(base)
    yield made
    made.clean_up()


def fill(volume: Volume) -> None:
    """Some files, and something in the trash."""
    made = slicefs("format", volume.meta, "testvol", "--bucket", volume.bucket)
    assert made.code == 0, made
    mount = volume.mount()
    for number in range(FILES):
        (mount.path / f"f{number}").write_bytes(content(number, MIB))
    (mount.path / "dir").mkdir()
    (mount.path / "gone").write_bytes(b"x")
    (mount.path / "gone").unlink()
    mount.umount()


@needs_mounts
def test_c6_warmup_draws_a_bar(volume: Volume) -> None:
    """Of 20 MiB at 5 MiB a second; nothing of it away from a terminal, and beside JSON."""
    fill(volume)
    limited = ("--download-limit", "5MiB", "--buffer-size", "32MiB")
    cache = ("--cache-dir", str(volume.base / "cache"), "--cache-size", "256MiB")
    mount = volume.mount(*cache, *limited)
    seen = at_terminal("warmup", mount.path)
    assert seen.code == 0, seen
    assert seen.screen == [""], "something is left on the terminal"
    bars = [re.fullmatch(r"\[(#* *)\] +(\d+)%  .*", frame) for frame in seen.frames]
    shares = [int(found[2]) for found in bars if found]
    assert len(shares) >= 3, seen.frames
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 100
    assert all(found is None or len(found[1]) == 30 for found in bars)
    assert "fetched     20.0 MiB" in seen.out
    assert at_terminal("warmup", mount.path, columns=24).screen == [""]
    for words in (("--evict",), ("--json",), ("--check", "--json")):
        seen = at_terminal("warmup", mount.path, *words)
        assert (seen.screen, seen.code) == ([""], 0), (words, seen)
        assert not seen.frames or "--json" not in words, seen.frames
    done = slicefs("warmup", mount.path)
    assert (done.code, done.err) == (0, "")
    volume.end()


@needs_mounts
def test_long_commands_leave_the_terminal_clean(volume: Volume) -> None:
    """Each draws a line, none that is wrapped, and takes it away; with `--json` none at all."""
    fill(volume)
    meta, base = volume.meta, volume.base
    (base / "copies").mkdir()
    hours = slicefs("restore", meta, "--json").out
    hour = re.findall(r'"hour": "([^"]+)"', hours)
    assert hour, hours
    commands: list[list[str | Path]] = [
        ["fsck", meta],
        ["fsck", "--data", meta],
        ["fsck", "--repair", meta],
        ["scrub", meta],
        ["gc", meta],
        ["gc", meta, "--compact", "--pack", "--delete"],
        ["dump", meta, base / "dump"],
        ["quota", "set", meta, "--path", "/dir", "--inodes", "1000"],
        ["quota", "check", meta],
        ["restore", meta, hour[0], "--put-back"],
        ["load", f"sqlite://{base}/loaded.db", base / "dump"],
        ["objbench", "--storage", "file", "--bucket", base / "bench", "--blocks", "2"],
    ]
    for words in commands:
        seen = at_terminal(*words)
        assert seen.code == 0, (words, seen)
        assert seen.frames, (words, seen)
        assert seen.screen == [""], (words, seen)
    for words in commands[:8]:
        seen = at_terminal(*words, "--json")
        assert seen.code == 0, (words, seen)
        assert not seen.frames, (words, seen)
        assert seen.screen == [""], (words, seen)


@needs_mounts
def test_a_message_stands_on_a_line_of_its_own(volume: Volume) -> None:
    """What goes wrong on the way stays, and the line goes on below it."""
    fill(volume)
    for path in volume.objects():
        path.write_bytes(b"")
    seen = at_terminal("gc", volume.meta, "--pack", "--pack-below", "1MiB", columns=400)
    assert seen.code == 1, seen
    assert len(seen.screen) == FILES + 1
    assert seen.screen[-1] == ""
    assert all(re.match(r"slicefs: inode \d+ is not packed: ", line) for line in seen.screen[:-1])
