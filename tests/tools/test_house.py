"""Each house rule fires on a small tree that breaks it, and a clean tree is silent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import house

DOC = '"""A module."""\n'
CLEAN = {
    "fsmeta/__init__.py": DOC,
    "fsmeta/types.py": DOC + "import enum\n",
    "fsmeta/runtime.py": DOC + "import time\n",
    "fsmeta/engine.py": DOC + "from fsmeta import types\n",
    "fsdata/__init__.py": DOC,
    "fsdata/objects.py": DOC + "from fsmeta.types import X\nimport redis\n",
    "fsclient/__init__.py": DOC,
    "fsclient/vfs.py": DOC + "from fsmeta import engine\nfrom fsdata.objects import y\n",
    "csi/__init__.py": DOC,
    "csi/node.py": DOC + "from csi import x\nimport grpc\n",
    "tools/bench.py": DOC + "import time\nimport fsclient.vfs\n",
    "tests/test_x.py": DOC + "import random\nfrom tools import bench\ndef test_x(): ...\n",
    "docs/notes.md": "x" * 200 + "\n",
}


def report(root: Path, files: dict[str, str]) -> list[str]:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return [str(finding) for finding in house.findings(root)]


def test_a_clean_tree_has_no_findings(tmp_path: Path) -> None:
    assert report(tmp_path, CLEAN) == []


def test_ignored_and_deleted_files_do_not_count(tmp_path: Path) -> None:
    report(tmp_path, {".gitignore": "build/\n", "build/x.py": "", "gone.py": ""})
    subprocess.run(["git", "-C", str(tmp_path), "add", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert house.findings(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("fsmeta/types.py", "import redis", "2: rank: rank 0 imports redis"),
        ("fsmeta/errors.py", "import fsmeta.store", "2: rank: rank 0 imports fsmeta.store"),
        ("fsmeta/__init__.py", "from . import engine", "2: rank: rank 0 imports fsmeta.engine"),
        ("fsmeta/check.py", "from fsdata import objects", "2: rank: fsmeta may not import fsdata"),
        ("fsdata/x.py", "from fsmeta import engine", "2: rank: fsdata may not import fsmeta.eng"),
        (
            "fsdata/x.py",
            "def _f():\n    import fsclient",
            "3: rank: fsdata may not import fsclient",
        ),
        (
            "fsmeta/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fsclient import vfs",
            "4: rank: fsmeta may not import fsclient.vfs",
        ),
        ("fsdata/x.py", "importlib.import_module('fsclient.vfs')", "2: rank: fsdata may not"),
        ("fsclient/x.py", "import tools.bench", "2: rank: fsclient may not import tools.bench"),
        ("csi/x.py", "from fsmeta.types import Ino", "2: rank: csi may not import fsmeta.types"),
        ("tools/x.py", "import tests", "2: rank: tools may not import tests"),
        ("fsclient/x.py", "from time import sleep", "2: seam: time is imported only by"),
        ("fsmeta/x.py", "import threading", "2: seam: threading is imported only by"),
        ("csi/x.py", "import random", "2: seam: random is imported only by"),
        ("fsdata/x.py", "try:\n    pass\nexcept:\n    pass", "4: bare-except: name what"),
        ("fsdata/x.py", "# TODO fix", "2: todo: say `TODO: what is missing"),
        (
            "fsdata/x.py",
            "# FIXME: this is not a known mark",
            "2: todo: write TODO instead of FIXME",
        ),
        ("fsdata/x.py", "x = '" + "y" * 96 + "'", "2: line-length: 102 characters"),
        ("fsdata/x.py", "x = 1\n" * 499, "501: file-length: 501 lines"),
        ("fsdata/x.py", "def _f():\n" + "    f()\n" * 70, "2: function-length: _f has 71 lines"),
        (
            "fsdata/x.py",
            "class C:\n    'It.'\n" + "    x = 1\n" * 299,
            "2: class-length: C has 301 lines, at most 300: move a part with state of its own",
        ),
        (
            "fsdata/x.py",
            "class C:\n    'It.'\n    def _f(self, a, b, c, d, e, *f, g, **h): ...",
            "4: parameters: C._f has 8 parameters, at most 7: pass a frozen dataclass",
        ),
        (
            "fsdata/x.py",
            "def _f(pool):\n    pool.on_end = print",
            "3: late-callback: pool.on_end is set from outside: pass it to the constructor",
        ),
        ("fsdata/x.py", "def f():\n    pass", "2: docstring: f has no docstring"),
        ("fsdata/x.py", "class C:\n    pass", "2: docstring: class C has no docstring"),
        ("fsdata/x.py", "def broken(:", "2: syntax: invalid syntax"),
        ("fsmeta/x.lua", "-- TODO", "2: todo: say `TODO"),
    ],
)
def test_each_rule_fires(tmp_path: Path, path: str, body: str, expected: str) -> None:
    found = report(tmp_path, {**CLEAN, path: DOC + body + "\n"})
    assert any(line.startswith(f"{path}:{expected}") for line in found), found


def test_limits_are_kept_at_the_limit_and_by_tests_not_at_all(tmp_path: Path) -> None:
    long = DOC + "class C:\n    'It.'\n" + "    x = 1\n" * 298
    many = "    def _f(self, a, b, c, d, e, *f, g): ...\n    @classmethod\n"
    many += "    def _g(cls, a, b, c, d, e, *f, g): ...\n"
    over = DOC + "class C:\n    'It.'\n    def f(self, a, b, c, d, e, f, g, h): ...\n"
    files = {
        "fsdata/x.py": long,
        "fsdata/y.py": DOC + "class D:\n    'It.'\n" + many,
        "tests/test_y.py": over + "    x = 1\n" * 300,
    }
    assert report(tmp_path, {**CLEAN, **files}) == []


def test_keyword_only_parameters_of_the_library_do_not_count(tmp_path: Path) -> None:
    named = "(url, *, a=0, b=0, c=0, d=0, e=0, f=0, g=0):\n{0}    'It.'\n"
    inner = "    def g" + named.format("        ")
    public = "class C:\n    'It.'\n    def __init__" + named.format("    ")
    kept = "class _C:\n    def f" + named.format("    ") + "    def _f" + named.format("    ")
    many = "def h(a, b, c, d, e, f, g, h):\n    'It.'\n"
    body = public + "def f" + named.format("") + inner + kept + many
    says = "has 8 parameters, at most 7: pass a frozen dataclass or NamedTuple"
    files = {"fsdata/x.py": DOC + "def f" + named.format(""), "slicefs/client/x.py": DOC + body}
    assert report(tmp_path, {**CLEAN, **files}) == [
        f"fsdata/x.py:2: parameters: f {says}",
        *(
            f"slicefs/client/x.py:{line}: parameters: {name} {says}"
            for line, name in ((8, "f.g"), (11, "_C.f"), (13, "_C._f"), (15, "h"))
        ),
    ]


def test_an_exception_that_is_no_longer_needed_is_a_violation(tmp_path: Path) -> None:
    listed = "# why\n\nfsdata/x.py: C\nfsdata/x.py: C.f  # a reason\nfsdata/y.py: g\n"
    over = DOC + "class C:\n    'It.'\n    def f(self, a, b, c, d, e, f, g, h):\n        'It.'\n"
    files = {
        "tools/houselib/exceptions.txt": listed,
        "fsdata/x.py": over + "    x = 1\n" * 300,
        "fsdata/y.py": DOC + "def g(a):\n    'It.'\n",
    }
    message = "tools/houselib/exceptions.txt:{}: exception: {} keeps its limit: remove this line"
    assert report(tmp_path, {**CLEAN, **files}) == [message.format(5, "fsdata/y.py: g")]
    files["fsdata/x.py"] = over
    gone = [message.format(3, "fsdata/x.py: C"), message.format(5, "fsdata/y.py: g")]
    assert report(tmp_path, {**CLEAN, **files}) == gone


SEMANTICS = "# Semantics\n\n## What holds, and when\n\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("- A. `meta/test_y.py::test_y`, `…::TestY::test_z`, `tests/meta/test_y.py`", None),
        ("- A. `posix/test_x.py::test_x`", "5: doc-test: posix/test_x.py is not there"),
        ("- A. `meta/test_y.py::test_x`", "5: doc-test: there is no test_x in tests/meta/test_y"),
        ("- A. `meta/test_y.py::test_z`", "5: doc-test: there is no test_z in tests/meta/test_y"),
        (
            "- A. `meta/test_y.py`,\n  `…::test_x`",
            "6: doc-test: there is no test_x in tests/meta",
        ),
        ("- A. `…y.py::test_y`", "5: doc-test: …y.py is not there"),
        ("- A. `sim/loads/x.py`", "5: doc-test: sim/loads/x.py is not there"),
        ("[a](notes.md) [b](../fsmeta) [c](#what-holds-and-when) [d](https://x/y#z)", None),
        ("[a](none.md)", "5: doc-link: none.md is not there"),
        ("[a](#what-holds)", "5: doc-link: #what-holds: there is no such heading"),
        ("[a]\n\n[a]: notes.md#none", "7: doc-link: notes.md#none: there is no such heading"),
    ],
)
def test_documents_name_what_is_there(tmp_path: Path, body: str, expected: str | None) -> None:
    tests = DOC + "def test_y(): ...\nclass TestY:\n    'Z.'\n    def test_z(self): ...\n"
    files = {"tests/meta/test_y.py": tests, "docs/SEMANTICS.md": SEMANTICS + body + "\n"}
    found = report(tmp_path, {**CLEAN, **files})
    if expected is None:
        assert found == []
    else:
        (line,) = found
        assert line.startswith(f"docs/SEMANTICS.md:{expected}")


def test_a_module_needs_a_docstring(tmp_path: Path) -> None:
    found = report(tmp_path, {"fsmeta/x.py": "x = 1\n"})
    assert found == ["fsmeta/x.py:1: docstring: the module has no docstring"]


def test_a_method_of_a_documented_protocol_needs_no_docstring(tmp_path: Path) -> None:
    store = DOC + (
        "from typing import Protocol\n"
        "class Store(Protocol):\n    'A store.'\n    def read(self) -> None: ...\n"
        "class Memory:\n    'In memory.'\n    def read(self) -> None: ...\n"
        "    def size(self) -> int: ...\n"
    )
    found = report(tmp_path, {"fsmeta/store.py": store})
    assert found == ["fsmeta/store.py:9: docstring: size has no docstring"]


def test_a_cycle_through_a_function_is_found_once(tmp_path: Path) -> None:
    files = {
        "fsmeta/a.py": DOC + "import fsmeta.b\n",
        "fsmeta/b.py": DOC + "def _f():\n    from . import c\n",
        "fsmeta/c.py": DOC + "from fsmeta.a import x\n",
    }
    found = report(tmp_path, {**CLEAN, **files})
    assert found == ["fsmeta/a.py:2: cycle: fsmeta.a → fsmeta.b → fsmeta.c → fsmeta.a"]


def test_a_cycle_through_a_package_that_an_import_runs_is_found(tmp_path: Path) -> None:
    files = {
        "fsclient/fuse/__init__.py": DOC + "from fsclient.fuse.session import Session\n",
        "fsclient/fuse/abi.py": DOC,
        "fsclient/fuse/session.py": DOC + "import fsclient.vfs\n",
        "fsclient/vfs.py": DOC + "from fsclient.fuse import abi\n",
    }
    found = report(tmp_path, {**CLEAN, **files})
    (line,) = [line for line in found if ": cycle: " in line]
    assert line.startswith("fsclient/fuse/__init__.py:2: cycle: fsclient.fuse → ")


def test_a_folder_has_a_rank_and_imports_lower_ranks_only(tmp_path: Path) -> None:
    files = {
        "fsmeta/store/contract.py": DOC + "def _f():\n    from fsmeta.txn import txn\n",
        "fsmeta/store/redis/engine.py": DOC + "from fsmeta.store import contract\n",
        "fsmeta/schema/keys.py": DOC + "import fsmeta.store.redis.engine\n",
        "fsmeta/txn/txn.py": DOC,
        "fsclient/attic/x.py": DOC,
    }
    packages = ("fsmeta/store", "fsmeta/store/redis", "fsmeta/schema", "fsmeta/txn")
    files |= {f"{folder}/__init__.py": DOC for folder in packages}
    found = report(tmp_path, {**CLEAN, **files})
    assert [line.split(";")[0] for line in found] == [
        "fsclient/attic:1: room: has no rank",
        "fsmeta/schema/keys.py:2: room: fsmeta/schema (rank 2) may not import "
        "fsmeta.store.redis.engine (rank 2)",
        "fsmeta/store/contract.py:3: room: fsmeta/store (rank 1) may not import "
        "fsmeta.txn.txn (rank 3)",
    ]


def test_a_sixteenth_file_in_a_folder_is_found(tmp_path: Path) -> None:
    files = {f"fsdata/blocks/m{number}.py": DOC for number in range(16)}
    (line,) = report(tmp_path, {**CLEAN, **files})
    assert line.startswith("fsdata/blocks:1: room: holds 16 files, at most 15")


def test_main_exits_with_one_where_there_are_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(tmp_path, {"fsmeta/x.py": "x = 1\n"})
    assert house.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "fsmeta/x.py:1: docstring: the module has no docstring\n"


def test_two_classes_of_one_name(tmp_path: Path) -> None:
    twice = DOC + 'class Place:\n    """It."""\n'
    found = report(tmp_path, {**CLEAN, "fsmeta/a.py": twice, "fsclient/b.py": twice})
    says = "class Place is defined in fsclient/b.py too: choose another name"
    assert found == [f"fsmeta/a.py:2: class-twice: {says}"]


def test_a_retired_word(tmp_path: Path) -> None:
    body = DOC + 'def vouches() -> bool:\n    """It."""\n    return True\n'
    found = report(tmp_path, {**CLEAN, "fsmeta/a.py": body})
    assert found == [
        "fsmeta/a.py:2: retired-word: vouches: the glossary says has_leases for vouches"
    ]


def test_a_sentence_about_a_person(tmp_path: Path) -> None:
    body = DOC + "x = 1  # Nobody reads it.\n"
    found = report(tmp_path, {**CLEAN, "fsmeta/a.py": body, "docs/notes.md": "Who knows.\n"})
    says = "name the component or the user"
    assert found == [
        f'docs/notes.md:1: private-word: "Who": {says}, and what it does',
        f'docs/notes.md:1: prose: a sentence begins with "Who": {says}',
        f'fsmeta/a.py:2: private-word: "Nobody": {says}, and what it does',
        f'fsmeta/a.py:2: prose: a sentence begins with "Nobody": {says}',
    ]


def test_a_private_word_in_a_sentence(tmp_path: Path) -> None:
    body = DOC + "x = 1  # Rows that nobody reads; a user who reads is a user.\n"
    found = report(tmp_path, {**CLEAN, "fsmeta/a.py": body})
    says = "name the component or the user, and what it does"
    assert found == [f'fsmeta/a.py:2: private-word: "nobody": {says}']


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ('f(help="Seen by nobody.")', 'private-word: "nobody"'),
        ('raise OSError(5, f"{x}: somebody has it")', 'private-word: "somebody"'),
        ('raise OSError("it waits" + (" for him" if x else ""))', 'private-word: "him"'),
        ('log.warning("a mount %s who died", x)', 'private-word: "who"'),
        ('log.error("Who knows %s", x)', 'prose: a sentence begins with "Who"'),
        ('echo.echo(f"{x}: mend it")', 'plain-word: a message says "mend": write "repair"'),
        ('raise OSError(f"start {x} anew")', 'plain-word: a message says "anew": write "again"'),
    ],
)
def test_a_private_word_in_a_message(tmp_path: Path, statement: str, expected: str) -> None:
    found = report(tmp_path, {**CLEAN, "fsmeta/a.py": DOC + statement + "\n"})
    assert f"fsmeta/a.py:2: {expected}" in "\n".join(found)


def test_a_message_is_reported_once_and_other_strings_are_not_messages(tmp_path: Path) -> None:
    body = DOC + 'NAME = "nobody"\nraise OSError(1, log.error(f"{NAME} is anew", NAME == "he"))\n'
    found = report(tmp_path, {**CLEAN, "fsmeta/a.py": body})
    assert [each.split(": ")[1] for each in found] == ["plain-word", "private-word"]
