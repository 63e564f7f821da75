"""`mount --web` on a phone: all sections show what a live mount does, 390 pixels wide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.program import Volume, needs_mounts, succeed
from tests.fsclient.observe.browser import CHROMIUM, NEEDED, browser_page
from tests.fsclient.observe.ports import free_port
from tests.support.waiting import wait_until

WIDTH = 390
SECTIONS = ("throughput", "operations", "stores", "levels", "queue", "quotas", "sessions")
# how many rows below its head each table has
ROWS = "Object.fromEntries([...document.querySelectorAll('table')].map(t => [t.id, t.rows.length]))"
TOO_WIDE = """
[document.documentElement, ...document.querySelectorAll('section')]
    .filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)
"""


@needs_mounts
@pytest.mark.skipif(CHROMIUM is None, reason=NEEDED)
def test_the_page_on_a_phone(embedded: Volume, tmp_path: Path) -> None:
    embedded.format()
    port = free_port()
    mount = embedded.mount("--web", f"127.0.0.1:{port}", name="a-mount-point-with-a-long-name")
    folder = mount.path / "a-directory-with-a-rather-long-name-as-users-have-them"
    folder.mkdir()
    words = ("--path", f"/{folder.name}", "--capacity", "1MiB")
    succeed("quota", "set", embedded.meta, *words)
    (folder / "file").write_bytes(b"x" * 1_000_000)
    with browser_page(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{port}/", WIDTH, 844)

        def is_filled() -> bool:
            """All tables have rows; there is something to show of the last two seconds."""
            (folder / "small").write_bytes(b"x")
            (folder / "small").unlink()
            rows = page.evaluate(ROWS)
            return [*rows] == [*SECTIONS] and all(count > 1 for count in rows.values())

        wait_until(is_filled)
        assert page.evaluate("document.getElementById('state').innerText").startswith("Live")
        assert page.evaluate("window.innerWidth") == WIDTH
        assert page.evaluate("document.querySelectorAll('#chart polyline').length") == 2
        text = page.evaluate("document.body.innerText")
        assert folder.name in text
        assert str(mount.path) in text
        page.save_png(tmp_path / "page.png")
        assert page.evaluate(TOO_WIDE) == []
        assert page.errors == []
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    embedded.end(f"quota of /{folder.name}: ")
