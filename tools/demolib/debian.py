"""A source package from Debian's archive, through apt and as the user of the demo.

apt gets lists and a cache of its own and the `deb-src` lines that belong to this system's own `deb`
ones: nothing of the system changes. It verifies the archive's signature and, by it, every file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

# 5,500 files, 400 directories, 77 symbolic links, some to nowhere; modes 664, 775; 12 MB packed
PACKAGE: Final = "systemd"
PART: Final = "*/test"  # a third of them, and all but one of the links
FETCH_S: Final = 300
ETC: Final = Path("/etc/apt")
OS_RELEASE: Final = Path("/etc/os-release")
_KINDS: Final = (".list", ".sources")
_WAIT: Final = "20"  # seconds for a mirror that does not answer


def fetch(target: Path, work: Path) -> None:
    """The files of PACKAGE's source, into `target`. Raises: OSError, SubprocessError."""
    apt = _private_apt(work)
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    for words in (["update"], ["source", "--download-only", "--only-source", PACKAGE]):
        subprocess.run(
            [*apt, *words], cwd=target, env=env, check=True, capture_output=True, timeout=FETCH_S
        )


def _private_apt(work: Path) -> list[str]:
    """apt-get with everything it reads and writes below `work`, but the keys and proxies."""
    for name in ("lists/partial", "cache/archives/partial", "sources.d"):
        (work / name).mkdir(parents=True)
    for at, (suffix, text) in enumerate(source_lists(ETC, codename())):
        (work / "sources.d" / f"{at}{suffix}").write_text(text)
    settings = {
        "Dir::State::lists": work / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": work / "sources.d",
        "APT::Sandbox::User": "",  # no other user writes files of ours
        "APT::Update::Error-Mode": "any",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": _WAIT,
        "Acquire::https::Timeout": _WAIT,
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return [shutil.which("apt-get") or "apt-get", "-qq", *options]


def codename() -> str:
    """This release's name, as suites begin."""
    found = re.search(r"^VERSION_CODENAME=\"?(\w+)", OS_RELEASE.read_text(), re.MULTILINE)
    return found[1] if found else ""


def source_lists(etc: Path, suite: str) -> Iterator[tuple[str, str]]:
    """The `deb-src` side of the configured archives: file suffix and text.

    Only those that have `suite` itself, which every mirror of the archive has; all where none has.
    """
    files = [*etc.glob("sources.list"), *sorted((etc / "sources.list.d").glob("*"))]
    texts = [(file.suffix, file.read_text()) for file in files if file.suffix in _KINDS]
    for wanted in ([suite], None):
        found = [
            (suffix, text)
            for suffix, whole in texts
            for text in (_stanzas(whole, wanted) if suffix == ".sources" else _lines(whole, wanted))
        ]
        if found:
            yield from found
            return


def _lines(text: str, wanted: list[str] | None) -> Iterator[str]:
    """From `deb [options] URI SUITE COMPONENT…`."""
    for line in text.splitlines():
        found = re.fullmatch(r"\s*deb\s+((?:\[[^]]*\]\s+)?\S+)\s+(\S+)\s+(.*)", line)
        if found is not None and (wanted is None or found[2] in wanted):
            yield f"deb-src {found[1]} {found[2]} {found[3]}\n"


def _stanzas(text: str, wanted: list[str] | None) -> Iterator[str]:
    """From deb822 paragraphs, whose keys may be of several lines."""
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        fields = dict(_fields(lines))
        suites = [each for each in fields.get("suites", "").split() if each in (wanted or [each])]
        types = fields.get("types", "").split()
        if "deb" not in types or not suites or fields.get("enabled", "yes").lower() == "no":
            continue
        kept = [line for line in lines if not re.match(r"(?i)(types|suites):", line)]
        yield "\n".join(["Types: deb-src", f"Suites: {' '.join(suites)}", *kept, ""])


def _fields(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and not line[:1].isspace():
            yield name.lower(), value.strip()
