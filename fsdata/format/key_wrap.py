"""A volume's data key, wrapped by what its users hold: an RSA key, or a passphrase.

`format` makes and wraps it, clients unwrap it before anything is mounted, `rekey` wraps it anew;
the data stay as they are. What is kept in the volume's settings is a map of texts:

    cipher   aes-256-gcm: what the data key is for
    wrap     rsa-oaep-sha256 or scrypt
    key      the wrapped key, hexadecimal; for scrypt a 12-byte nonce, then AES-256-GCM
    holder   RSA: which key, the first 16 hex digits of SHA-256 of the public key's DER form
    salt n r p   scrypt's parameters

The volume's uuid is bound to the wrapped key, so that of another volume does not fit.
Threading: pure functions; unwrapping takes half a second and 128 MiB with a passphrase.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fsmeta.errors import ConfigError

KEY_BYTES: Final = 32
CIPHER: Final = "aes-256-gcm"
RSA: Final = "rsa-oaep-sha256"
SCRYPT: Final = "scrypt"
RSA_BITS_MIN: Final = 2048
PASSPHRASE_BYTES_MIN: Final = 8
_LOG2_N: Final = 17  # with r = 8 half a second and 128 MiB for each guess, what OWASP advises
_R: Final = 8
_N_MAX: Final = 1 << 20  # a record that asks for more memory than 1 GiB is damaged
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12


class Passphrase:
    """A passphrase that no log or traceback shows."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __repr__(self) -> str:
        return "Passphrase(…)"


class RsaKey:
    """A private RSA key in PEM, perhaps protected by a passphrase. `path` is for messages."""

    def __init__(self, path: str, pem: bytes, passphrase: bytes | None = None) -> None:
        self.path = path
        self._pem = pem
        self._passphrase = passphrase

    def __repr__(self) -> str:
        return f"RsaKey({self.path!r})"

    def needs_passphrase(self) -> bool:
        """Whether the key is protected and no passphrase is known."""
        if self._passphrase is not None:
            return False
        try:
            serialization.load_pem_private_key(self._pem, None)
        except TypeError:  # how the library says that a passphrase is missing
            return True
        except (ValueError, UnsupportedAlgorithm):
            pass
        return False

    def load(self) -> RSAPrivateKey:
        """Raises: ConfigError."""
        try:
            key = serialization.load_pem_private_key(self._pem, self._passphrase)
        except TypeError:
            if self._passphrase is not None:  # it is not protected, so it needs none
                return RsaKey(self.path, self._pem).load()
            raise ConfigError(
                f"the RSA key {self.path} is protected: set SLICEFS_RSA_PASSPHRASE"
            ) from None
        except (ValueError, UnsupportedAlgorithm):
            why = "its passphrase is wrong, or it is no" if self._passphrase else "it is no"
            raise ConfigError(
                f"can't read the RSA key {self.path}: {why} private key in PEM"
            ) from None
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(f"the key {self.path} is no RSA key: make one with `openssl genrsa`")
        if key.key_size < RSA_BITS_MIN:
            raise ConfigError(
                f"the RSA key {self.path} has {key.key_size} bits: use {RSA_BITS_MIN} or more"
            )
        return key


Holder = Passphrase | RsaKey
"""What a user brings to wrap or unwrap a data key."""


def new_key() -> bytes:
    """A fresh data key."""
    return secrets.token_bytes(KEY_BYTES)


def wrap(key: bytes, uuid: str, holder: Holder) -> dict[str, str]:
    """What the volume's settings keep of `key`. Raises: ConfigError."""
    if isinstance(holder, RsaKey):
        record = _wrap_rsa(key, uuid, holder)
    else:
        record = _wrap_passphrase(key, uuid, holder)
    assert unwrap(record, uuid, holder) == key, "what was just wrapped"
    return record


def unwrap(record: Mapping[str, str], uuid: str, holder: Holder | None) -> bytes:
    """The data key of a volume. Raises: ConfigError with what to bring."""
    if record.get("cipher") != CIPHER or record.get("wrap") not in (RSA, SCRYPT):
        raise ConfigError("the volume is encrypted in a way this slicefs does not know: upgrade it")
    if holder is None:
        raise ConfigError(f"the volume is encrypted: {_remedy(record)}")
    try:
        key = _unwrap(record, uuid, holder)
    except (KeyError, ValueError, MemoryError) as error:
        raise ConfigError(
            f"the volume's wrapped key can't be read ({error!r}): restore the metadata"
        ) from None
    if key is None or len(key) != KEY_BYTES:
        what = f"RSA key {holder.path}" if isinstance(holder, RsaKey) else "passphrase"
        raise ConfigError(f"the {what} does not open this volume: {_remedy(record)}")
    return key


def _remedy(record: Mapping[str, str]) -> str:
    if record["wrap"] == RSA:
        return f"give RSA key {record.get('holder')} with --encrypt-rsa-key PATH"
    return "set SLICEFS_PASSPHRASE, or --encrypt-passphrase to be asked"


def _unwrap(record: Mapping[str, str], uuid: str, holder: Holder) -> bytes | None:
    """The key, or None where the holder is the wrong one. Raises: KeyError, ValueError."""
    wrapped = bytes.fromhex(record["key"])
    if isinstance(holder, RsaKey):
        private = holder.load()
        if record["wrap"] != RSA or _name(private) != record["holder"]:
            return None
        try:
            return private.decrypt(wrapped, _padding(uuid))
        except ValueError:
            return None
    if record["wrap"] != SCRYPT:
        return None
    salt = bytes.fromhex(record["salt"])
    outer = _stretch(holder, salt, int(record["n"]), int(record["r"]), int(record["p"]))
    nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
    try:
        return AESGCM(outer).decrypt(nonce, sealed, uuid.encode())
    except InvalidTag:
        return None


def _wrap_rsa(key: bytes, uuid: str, holder: RsaKey) -> dict[str, str]:
    private = holder.load()
    wrapped = private.public_key().encrypt(key, _padding(uuid))
    return {"cipher": CIPHER, "wrap": RSA, "holder": _name(private), "key": wrapped.hex()}


def _padding(uuid: str) -> padding.OAEP:
    return padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), uuid.encode())


def _name(private: RSAPrivateKey) -> str:
    """Which key it is, in a few digits."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    der = private.public_key().public_bytes(serialization.Encoding.DER, form)
    return hashlib.sha256(der).hexdigest()[:16]


def _wrap_passphrase(key: bytes, uuid: str, holder: Passphrase) -> dict[str, str]:
    if len(holder.text) < PASSPHRASE_BYTES_MIN:
        raise ConfigError(f"the passphrase is too short: use {PASSPHRASE_BYTES_MIN} bytes or more")
    salt, nonce = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
    outer = _stretch(holder, salt, 1 << _LOG2_N, _R, 1)
    return {
        "cipher": CIPHER,
        "wrap": SCRYPT,
        "salt": salt.hex(),
        "n": str(1 << _LOG2_N),
        "r": str(_R),
        "p": "1",
        "key": (nonce + AESGCM(outer).encrypt(nonce, key, uuid.encode())).hex(),
    }


def _stretch(holder: Passphrase, salt: bytes, n: int, r: int, p: int) -> bytes:
    """Raises: ValueError for parameters that can't be."""
    if not (1 < n <= _N_MAX and 0 < r <= _R and 0 < p <= 16):
        raise ValueError(f"scrypt n {n} r {r} p {p}")
    room = 128 * r * (n + p + 2)
    return hashlib.scrypt(holder.text, salt=salt, n=n, r=r, p=p, maxmem=room, dklen=KEY_BYTES)
