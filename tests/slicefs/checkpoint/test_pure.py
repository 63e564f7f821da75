"""Names, retention, manifests and safetensors, without any store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given, strategies as st

from fsmeta.errors import ConfigError, Corrupt
from slicefs.checkpoint import layout
from slicefs.checkpoint.manifest import Digester, FileEntry, StepManifest, decode
from slicefs.checkpoint.retention import RetainedStep, Retention
from slicefs.checkpoint.safetensors import (
    TensorSpec,
    decode_header,
    encode_header,
    header_length,
)

STEPS = st.lists(st.integers(0, 60), unique=True, max_size=20)
NUMBERS = st.none() | st.integers(1, 12)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step0", 0),
        ("step1000", 1000),
        ("step1000-unsharded", 1000),
        ("global_step12", 12),
        ("checkpoint-500", 500),
        ("step", None),
        ("step-unsharded", None),
        ("step10.tmp", None),
        ("latest", None),
        ("step" + "9" * 16, None),
    ],
)
def test_names_of_steps(name: str, number: int | None) -> None:
    parsed = layout.parse_step(name)
    assert (None if parsed is None else parsed.number) == number


def test_step_zero_is_no_real_step() -> None:
    names = ["step0", "step20-unsharded", "step3", "config.yaml", "step0-unsharded"]
    assert layout.real_steps(names) == ["step3", "step20-unsharded"]


@pytest.mark.parametrize("number", [-1, 1.5, True, 10**15, "7"])
def test_numbers_that_are_no_steps(number: object) -> None:
    with pytest.raises(ConfigError, match="use a whole number"):
        layout.step_name(number)  # type: ignore[arg-type]


def test_a_token_of_an_ended_process_is_abandoned() -> None:
    program = "from slicefs.checkpoint.layout import new_token; print(new_token(5))"
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    token = ended.stdout.decode().strip()
    assert layout.is_abandoned(token)
    assert not layout.is_abandoned(layout.new_token(7))
    elsewhere = "00000000" + token[8:]
    assert not layout.is_abandoned(elsewhere)
    assert layout.parse_private(f".saving-step7-{token}") == layout.Private("saving", 7, token)
    assert str(os.getpid()) in layout.new_token(1)


def test_retention_keeps_the_last_and_the_round() -> None:
    policy = Retention(keep_last=2, keep_every=100)
    steps = [RetainedStep(number, False) for number in range(50, 401, 50)]
    assert policy.doomed(steps) == [50, 150, 250]


def test_ephemeral_steps_go_with_the_next_one() -> None:
    policy = Retention(keep_last=2, keep_every=None, ephemeral_every=10)
    steps = [
        RetainedStep(5, False),
        RetainedStep(10, True),
        RetainedStep(15, False),
        RetainedStep(20, True),
    ]
    assert policy.doomed(steps) == [10]


@given(STEPS, NUMBERS, NUMBERS, NUMBERS)
def test_retention_never_takes_the_newest(
    numbers: list[int], last: int | None, every: int | None, ephemeral: int | None
) -> None:
    policy = Retention(last, every, ephemeral)
    steps = [RetainedStep(number, policy.is_ephemeral(number)) for number in numbers]
    gone = policy.doomed(steps)
    assert set(gone) <= set(numbers)
    assert not numbers or max(numbers) not in gone
    assert not any(policy.is_permanent(number) for number in gone)
    left = [step for step in steps if step.number not in gone]
    assert policy.doomed(left) == []


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "ephemeral_every"])
def test_retention_refuses_nothing_to_keep(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        Retention(**{name: 0}).checked()


def test_a_manifest_survives_its_encoding() -> None:
    digester = Digester(chunk_bytes=10)
    digester.update(b"0123456")
    digester.update(memoryview(b"789012345678901234"))
    entry = digester.entry()
    assert (entry.size, len(entry.crcs)) == (25, 3)
    entry.check("a", 0, b"0123456789")
    entry.check("a", 2, b"01234")
    with pytest.raises(OSError, match="not what was saved"):
        entry.check("a", 2, b"01235")
    files = {"a/b": entry, "odd\udcff": FileEntry(0, "00", array("I"))}
    manifest = StepManifest(7, "token", "run", "save-x", True, files)
    assert decode(manifest.encode(), "here") == manifest


@given(st.integers(0, 400), st.integers(1, 255))
def test_no_flipped_byte_of_a_manifest_is_believed(at: int, flip: int) -> None:
    manifest = StepManifest(7, "t", "", "", False, {"a": FileEntry(3, "ab" * 32, array("I", [5]))})
    data = bytearray(manifest.encode())
    data[at % len(data)] ^= flip
    try:
        assert decode(bytes(data), "here") == manifest
    except Corrupt:
        pass


@pytest.mark.parametrize("name", ["../up", "/root", "a//b", "", "a/./b"])
def test_a_manifest_names_nothing_outside(name: str) -> None:
    manifest = StepManifest(7, "t", "", "", False, {name: FileEntry(0, "", array("I"))})
    with pytest.raises(Corrupt, match="not a relative path"):
        decode(manifest.encode(), "here")


def test_safetensors_have_the_format_of_their_readers() -> None:
    specs = [("w", TensorSpec("F32", (2, 3))), ("b", TensorSpec("BF16", ())), ("e", _EMPTY)]
    header = encode_header(specs, {"format": "pt"})
    assert header_length(header[:8], "f") == len(header)
    assert len(header) % 8 == 0
    assert json.loads(header[8:])["b"] == {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}
    found = decode_header(header, len(header) + 26, "f")
    assert found["w"].begin == len(header)
    assert found["e"].begin == found["e"].end
    with pytest.raises(Corrupt, match="bytes, not"):
        decode_header(header, len(header) + 25, "f")
    with pytest.raises(Corrupt, match="shorter than 8"):
        header_length(b"123", "f")
    with pytest.raises(ConfigError, match="is taken"):
        encode_header([specs[0], specs[0]])


_EMPTY = TensorSpec("I64", (0, 4))
