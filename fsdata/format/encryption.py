"""AES-256-GCM for the units of blocks: the one place that encrypts data.

Each object has a key of its own, derived from the volume's key, a fresh salt of 16 random bytes,
the slice and the block, so a nonce need only be unique within one object: it is the number of the
unit. Tags authenticate slice, block, unit, and the object's head with the unit's length. The
argument is in docs/design/object-stores.

Threading: any thread; the ciphers have no state but their key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from struct import Struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fsdata.format.block_v2 import SALT_BYTES, Buffer, Cipher
from fsmeta.errors import ObjectDamaged
from fsmeta.runtime import Runtime
from fsmeta.types import SliceId

KEY_BYTES: Final = 32
_LABEL: Final = b"slicefs block v1"
_PLACE: Final = Struct("<QI")  # slice, block
_NONCE: Final = Struct("<IQ")  # unit, zero
assert _NONCE.size == 12, "what GCM uses as it is"


class BlockCipher:
    """The units of one object."""

    def __init__(self, key: bytes, place: bytes) -> None:
        self._gcm = AESGCM(key)
        self._place = place

    def seal(self, unit: int, data: Buffer, about: bytes) -> bytes:
        return self._gcm.encrypt(_NONCE.pack(unit, 0), data, self._place + about)

    def open(self, unit: int, data: Buffer, about: bytes) -> bytes:
        try:
            return self._gcm.decrypt(_NONCE.pack(unit, 0), data, self._place + about)
        except InvalidTag as error:
            raise ObjectDamaged(
                f"unit {unit} was encrypted with another key, or for another place"
            ) from error


class Sealer:
    """Makes the ciphers of a volume's objects."""

    def __init__(self, runtime: Runtime, key: bytes) -> None:
        assert len(key) == KEY_BYTES, "unwrapped and checked"
        self._key = key
        self._random_bits = runtime.random_bits

    def fresh(self, slice_id: SliceId, block: int) -> tuple[bytes, Cipher]:
        """Salt and cipher of an object that is about to be written."""
        salt = self._random_bits(8 * SALT_BYTES).to_bytes(SALT_BYTES, "little")
        return salt, self.cipher(slice_id, block, salt)

    def cipher(self, slice_id: SliceId, block: int, salt: bytes) -> Cipher:
        """The cipher of an object whose head says `salt`."""
        place = _PLACE.pack(slice_id, block)
        return BlockCipher(hmac.digest(self._key, _LABEL + salt + place, "sha256"), place)


_CONFORMS: Callable[[bytes, bytes], Cipher] = BlockCipher
