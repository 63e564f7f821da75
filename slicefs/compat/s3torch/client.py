"""Region, address and `S3ClientConfig`: how a shim opens the tree of a URL.

Called by the other modules here. Threading: functions only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.files import Checkpoint
from slicefs.compat.options import accepted
from slicefs.stores.opening import open_tree
from slicefs.stores.s3 import S3Tree
from slicefs.stores.tree import Tree

_EXPRESS: Final = "--x-s3"  # directory buckets have another way to sign


@dataclass(frozen=True)
class S3ClientConfig:
    """`profile` and `force_path_style` count; what is about speed does nothing here."""

    throughput_target_gbps: float = 10.0
    part_size: int = 8 << 20
    unsigned: bool = False
    force_path_style: bool = False
    max_attempts: int = 10
    profile: str | None = None


_USUAL: Final = S3ClientConfig()


class S3Place(NamedTuple):
    """Opens trees; it pickles, and has no secret."""

    region: str = ""
    endpoint: str = ""
    path_style: bool | None = None
    profile: str = ""

    def tree(self, url: str | os.PathLike[str]) -> Tree:
        """The tree of a URL; what s3:// names is in this region, at this address.

        Raises: ConfigError.
        """
        text = checked(url)
        if text.startswith("s3://") and text[5:].partition("/")[0].endswith(_EXPRESS):
            raise ConfigError(f"{text}: directory buckets of S3 Express are not supported")
        tree = open_tree(text)
        if not isinstance(tree, S3Tree) or not text.startswith("s3://"):
            return tree
        usual = tree.bucket.account
        account = usual._replace(
            region=self.region or usual.region,
            endpoint=self.endpoint or usual.endpoint,
            path_style=self.path_style,
            profile=self.profile or usual.profile,
        )
        return S3Tree(tree.bucket._replace(account=account))

    def files(self, url: str | os.PathLike[str]) -> Checkpoint:
        """Files below a URL. Raises: ConfigError."""
        return Checkpoint(self.tree(url))


def checked(url: str | os.PathLike[str]) -> str:
    """The text of a URL. Raises: ConfigError for what would name a local directory `s3:`."""
    text = os.fspath(url)
    if text.startswith("s3:/") and not text.startswith("s3://"):
        raise ConfigError(f"{text}: pass the URL as a str: a pathlib.Path loses a slash")
    return text


def place_of(
    where: str,
    region: str | None,
    endpoint: str | None = None,
    config: S3ClientConfig | None = None,
    **more: Any,
) -> S3Place:
    """What opens trees for a class of the connector. Raises: ConfigError."""
    config = config or _USUAL
    if config.unsigned:
        raise ConfigError(
            f"{where}: unsigned requests are not supported: set keys, and leave it out"
        )
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"{where}: endpoint {endpoint!r} is no address: use http(s)://HOST[:PORT]"
        )
    speed = ("throughput_target_gbps", "part_size", "max_attempts")
    given = {name: getattr(config, name) for name in speed}
    given = {name: value for name, value in given.items() if value != getattr(_USUAL, name)}
    accepted(where, **given, **more)
    style = True if config.force_path_style else None
    return S3Place(region or "", endpoint or "", style, config.profile or "")
