"""From a URL to a tree: `open_tree`, which everything that takes a URL calls.

    DIR, file:///DIR          a directory, a mount's included
    s3://BUCKET/PREFIX        AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile's address
    r2://BUCKET/PREFIX        R2_ENDPOINT_URL or R2_ACCOUNT_ID; R2_PROFILE
    gs://BUCKET/PREFIX        GS_ENDPOINT_URL (Google's S3-compatible one); GS_PROFILE: HMAC keys
    slicefs://VOLUME/PATH     the volume that the environment or the profile file names
    META-URL#PATH             a volume by its metadata: redis://…, tikv://…, sqlite://…

Everything that is wrong in a URL is a ConfigError of one line. Threading: functions only.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url
from slicefs.client.volumes import is_volume_url, split_volume_url

if TYPE_CHECKING:
    from slicefs.client.client import Client
    from slicefs.stores.tree import Tree

HELP: Final = (
    "use a directory, file:///DIR, s3://BUCKET/PREFIX, r2://…, gs://…, slicefs://VOLUME/PATH "
    "or META-URL#PATH"
)
_BUCKETS: Final = ("s3", "r2", "gs")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_GOOGLE: Final = "https://storage.googleapis.com"


def open_tree(url: str | os.PathLike[str], *, client: Client | None = None) -> Tree:
    """The tree that a URL names; nothing is connected before its first use.

    `client`: the volume to use in place of one of the tree's own, for a path as the client takes
    it, relative ones below the path of its URL, or for a URL of the same volume.
    Raises: ConfigError.
    """
    text = os.fspath(url)
    if client is not None:
        return _of_client(text, client)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _directory(text)
    if not _SCHEME.fullmatch(scheme):
        raise ConfigError(f"URL {text!r} has no scheme: {HELP}")
    if scheme == "file":
        return _directory(_local_path(text, rest))
    if scheme in _BUCKETS:
        return _bucket(scheme, rest)
    if is_volume_url(text):
        return _volume(text)
    raise ConfigError(f"URL scheme {scheme!r} is unknown: {HELP}")


def _of_client(text: str, client: Client) -> Tree:
    """Raises: ConfigError."""
    from slicefs.stores.volume import VolumeTree

    if "://" not in text:
        return VolumeTree(client, text if text.startswith("/") else f"{client.path}/{text}")
    if is_volume_url(text):
        meta, path = split_volume_url(text)
        if client.is_of(meta):
            return VolumeTree(client, path)
    raise ConfigError(f"{shown_url(text)}: is of another place than the client: leave one out")


def _directory(path: str) -> Tree:
    from slicefs.stores.local import LocalTree

    if not path:
        raise ConfigError(f"the URL names nothing: {HELP}")
    return LocalTree(os.path.expanduser(path))


def _local_path(url: str, rest: str) -> str:
    if not rest.startswith("/"):
        raise ConfigError(f"{url}: write file:///DIR with three slashes")
    return unquote(rest)


def _volume(url: str) -> Tree:
    from slicefs.client.client import Client
    from slicefs.stores.volume import VolumeTree

    meta, path = split_volume_url(url)
    return VolumeTree(Client(meta), path)


def _bucket(scheme: str, rest: str) -> Tree:
    """Raises: ConfigError."""
    name, _, prefix = rest.partition("/")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{scheme}://{name}: no bucket can have this name: check the URL")
    from fsdata.objects.s3.credentials import S3Account
    from slicefs.stores.s3 import BucketTree, S3Tree
    from slicefs.stores.tree import clean_path

    clean = clean_path(prefix)
    endpoint, region, checksum = "", "", "crc32c"
    profile = os.environ.get(f"{scheme.upper()}_PROFILE", "")
    if scheme == "s3":
        endpoint = _variable("AWS_ENDPOINT_URL_S3") or _variable("AWS_ENDPOINT_URL")
    elif scheme == "r2":
        endpoint, region = _cloudflare(), "auto"
    else:
        endpoint, region = _variable("GS_ENDPOINT_URL") or _GOOGLE, "auto"
        checksum = "none"  # Google knows no such header
    account = S3Account(endpoint=endpoint, region=region, profile=profile)
    url = f"{scheme}://{name}/{clean}".rstrip("/")
    return S3Tree(BucketTree(url, name, f"{clean}/" if clean else "", account, checksum))


def _cloudflare() -> str:
    """Raises: ConfigError."""
    account = os.environ.get("R2_ACCOUNT_ID", "")
    default = f"https://{account}.r2.cloudflarestorage.com" if account else ""
    endpoint = _variable("R2_ENDPOINT_URL") or default
    if not endpoint:
        raise ConfigError("r2:// has no address: set R2_ENDPOINT_URL or R2_ACCOUNT_ID")
    return endpoint


def _variable(name: str) -> str:
    """An address in the environment. Raises: ConfigError."""
    value = os.environ.get(name, "")
    if value and not value.startswith(("http://", "https://")):
        raise ConfigError(f"{name}: {value!r} is no address: use http(s)://HOST[:PORT]")
    return value
