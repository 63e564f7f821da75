"""O3: the data key, wrapped by RSA keys and passphrases; wrong, lost and damaged ones."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from fsdata.format.key_wrap import KEY_BYTES, Passphrase, RsaKey, new_key, unwrap, wrap
from fsmeta.errors import ConfigError

UUID, OTHER = "5f0e8a8e-0000-4000-8000-000000000001", "5f0e8a8e-0000-4000-8000-000000000002"
WORDS = Passphrase(b"correct horse battery")


def pem(passphrase: bytes | None = None, bits: int = 2048) -> bytes:
    key = rsa.generate_private_key(65537, bits)
    hide = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase)
    )
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, hide)


def test_a_passphrase_wraps_and_unwraps() -> None:
    key = new_key()
    assert len(key) == KEY_BYTES
    record = wrap(key, UUID, WORDS)
    assert unwrap(record, UUID, WORDS) == key
    assert key.hex() not in str(record)
    assert wrap(key, UUID, WORDS) != record, "salted anew"
    with pytest.raises(ConfigError, match="the passphrase does not open this volume: set SLICEFS"):
        unwrap(record, UUID, Passphrase(b"correct horse Battery"))
    with pytest.raises(ConfigError, match="does not open this volume"):
        unwrap(record, OTHER, WORDS)
    with pytest.raises(ConfigError, match="is encrypted: set SLICEFS_PASSPHRASE"):
        unwrap(record, UUID, None)
    with pytest.raises(ConfigError, match=r"RSA key k\.pem does not open"):
        unwrap(record, UUID, RsaKey("k.pem", pem()))


def test_an_rsa_key_wraps_and_unwraps() -> None:
    key, holder = new_key(), RsaKey("key.pem", pem(b"inner"), b"inner")
    record = wrap(key, UUID, holder)
    assert unwrap(record, UUID, holder) == key
    with pytest.raises(ConfigError, match=r"RSA key other\.pem does not open this volume: give"):
        unwrap(record, UUID, RsaKey("other.pem", pem()))
    with pytest.raises(ConfigError, match="does not open this volume"):
        unwrap(record, OTHER, holder)
    with pytest.raises(ConfigError, match=r"give RSA key [0-9a-f]{16} with --encrypt-rsa-key"):
        unwrap(record, UUID, None)
    with pytest.raises(ConfigError, match="passphrase does not open"):
        unwrap(record, UUID, WORDS)


def test_rsa_keys_that_can_t_be_used() -> None:
    protected = pem(b"inner")
    assert RsaKey("k", protected).needs_passphrase()
    assert not RsaKey("k", protected, b"any").needs_passphrase()
    assert not RsaKey("k", b"nothing").needs_passphrase()
    assert RsaKey("k", pem(), b"needless").load().key_size == 2048
    elliptic = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for bad, match in (
        (RsaKey("k", protected), "is protected: set SLICEFS_RSA_PASSPHRASE"),
        (RsaKey("k", protected, b"wrong"), "its passphrase is wrong"),
        (RsaKey("k", b"-----BEGIN"), "no private key in PEM"),
        (RsaKey("k", elliptic), "no RSA key"),
        (RsaKey("k", pem(bits=1024)), "has 1024 bits: use 2048"),
    ):
        with pytest.raises(ConfigError, match=match):
            wrap(new_key(), UUID, bad)


def test_short_passphrases_are_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        wrap(new_key(), UUID, Passphrase(b"1234567"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", "zz"), ("key", ""), ("n", "1"), ("n", str(1 << 40)), ("salt", "x"), ("p", "-1")],
)
def test_damaged_records_are_named(field: str, value: str) -> None:
    record = {**wrap(new_key(), UUID, WORDS), field: value}
    with pytest.raises(ConfigError, match=r"can't be read|does not open"):
        unwrap(record, UUID, WORDS)
    with pytest.raises(ConfigError, match="can't be read"):
        unwrap({"cipher": "aes-256-gcm", "wrap": "scrypt"}, UUID, WORDS)
    with pytest.raises(ConfigError, match="upgrade"):
        unwrap({**record, "wrap": "argon3"}, UUID, WORDS)


def test_golden_record() -> None:
    """A record as an earlier client wrote it stays readable."""
    record = {
        "cipher": "aes-256-gcm",
        "wrap": "scrypt",
        "salt": "00112233445566778899aabbccddeeff",
        "n": "1024",
        "r": "8",
        "p": "1",
        "key": "000000000000000000000000c74588f60f7ab7e19428a286fa19296b4fc5"
        "85242439567ff20aae81e079c179c529e21d962b6e231e22c90c7a6272a1",
    }
    assert unwrap(record, UUID, WORDS) == bytes(range(32))


def test_secrets_are_in_no_text() -> None:
    assert "horse" not in repr(WORDS)
    assert "inner" not in repr(RsaKey("k", b"BEGIN", b"inner"))
