"""What a user brings to open an encrypted volume, and the `Sealer` that it yields.

The commands collect a `KeyOffer` before anything forks or connects; `client` and the tools unwrap
the volume's key with it. Secrets come from the environment, a file or the terminal, never from an
argument, and are in no text that this makes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from fsmeta.errors import ConfigError
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer
    from fsdata.format.key_wrap import Holder, RsaKey

PEM_BYTES_MAX: Final = 1 << 16  # a key of 16,384 bits has 13 KB
_INSTALL: Final = "encryption needs a package: pip install 'slicefs[encrypt]'"


class KeyOffer:
    """An RSA key, a passphrase, both or neither."""

    def __init__(
        self,
        rsa: RsaKey | None = None,
        passphrase: bytes | None = None,
        insists: bool = False,
    ) -> None:
        """`insists`: the user expects the volume to be encrypted."""
        self._rsa = rsa
        self._passphrase = passphrase
        self.insists = insists

    def __repr__(self) -> str:
        return "KeyOffer(…)"

    def is_empty(self) -> bool:
        """Whether nothing is offered."""
        return self._rsa is None and self._passphrase is None

    def holder(self) -> Holder | None:
        """What is to wrap a new key: the RSA key before the passphrase."""
        return self._rsa or self.passphrase()

    def holder_for(self, wrapped_by: str) -> Holder | None:
        """What opens a key that was wrapped that way, as far as it is here."""
        from fsdata.format.key_wrap import RSA

        if wrapped_by == RSA:
            return self._rsa or self.passphrase()
        return self.passphrase() or self._rsa

    def passphrase(self) -> Holder | None:
        """The passphrase, if there is one."""
        from fsdata.format.key_wrap import Passphrase

        return None if self._passphrase is None else Passphrase(self._passphrase)


def read_rsa_key(path: str, passphrase: bytes | None) -> RsaKey:
    """The RSA key in a file, not looked at yet. Raises: ConfigError."""
    require_package()
    from fsdata.format.key_wrap import RsaKey

    try:
        with open(path, "rb") as file:
            return RsaKey(path, file.read(PEM_BYTES_MAX), passphrase)
    except OSError as error:
        raise ConfigError(f"can't read the RSA key {path}: {error.strerror}") from error


def require_package() -> None:
    """Raises: ConfigError where nothing can be encrypted here."""
    try:
        import cryptography
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    del cryptography


def new_settings(settings: VolumeFormat, holder: Holder) -> VolumeFormat:
    """`settings` of a volume that is yet to be made, with a new key. Raises: ConfigError."""
    from fsdata.format.key_wrap import new_key, wrap

    return settings.with_encryption(wrap(new_key(), settings.uuid, holder))


def rewrapped(settings: VolumeFormat, offer: KeyOffer, holder: Holder) -> VolumeFormat:
    """`settings` with the same key wrapped for another holder. Raises: ConfigError."""
    from fsdata.format.key_wrap import wrap

    key = _unwrapped(settings, offer)
    return settings.with_encryption(wrap(key, settings.uuid, holder))


def sealer_of(settings: VolumeFormat, runtime: Runtime, offer: KeyOffer | None) -> Sealer | None:
    """What encrypts and decrypts the volume's blocks; None where they are not encrypted.

    Raises: ConfigError where the key can't be had.
    """
    if settings.encryption is None:
        if offer is not None and offer.insists:
            raise ConfigError(
                f"volume {settings.name} is not encrypted: leave out --encrypt-rsa-key "
                "and --encrypt-passphrase"
            )
        return None
    key = _unwrapped(settings, offer or KeyOffer())
    from fsdata.format.encryption import Sealer

    return Sealer(runtime, key)


def _unwrapped(settings: VolumeFormat, offer: KeyOffer) -> bytes:
    """The volume's key. Raises: ConfigError."""
    if settings.encryption is None:
        raise ConfigError(f"volume {settings.name} is not encrypted: there is no key to change")
    require_package()
    from fsdata.format.key_wrap import unwrap

    record = settings.encryption
    return unwrap(record, settings.uuid, offer.holder_for(record.get("wrap", "")))


def env_bytes(*names: str) -> bytes | None:
    """The first of these environment variables that says something."""
    found = (os.environ.get(name) for name in names)
    return next((os.fsencode(value) for value in found if value), None)
