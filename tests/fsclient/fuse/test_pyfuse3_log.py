"""Which lines of pyfuse3 come into the log of a mount."""

from __future__ import annotations

import logging
import os

import pytest

from fsclient.fuse.pyfuse3.session import is_worth_a_line


@pytest.mark.parametrize(
    ("text", "number", "worth"),
    [
        ("fuse_release(): fuse_reply_* failed with %s", "ENOENT", False),
        ("fuse_write(): fuse_reply_* failed with %s", "EINVAL", True),
        ("something else: %s", "ENOENT", True),
    ],
)
def test_answers_to_a_mount_that_is_gone(text: str, number: str, worth: bool) -> None:
    """As pyfuse3 3.4 words it, with the text of an errno."""
    said = os.strerror({"ENOENT": 2, "EINVAL": 22}[number])
    record = logging.LogRecord("pyfuse3", logging.ERROR, __file__, 1, text, (said,), None)
    assert is_worth_a_line(record) is worth
