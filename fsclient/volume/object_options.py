"""Where a volume's objects are, in users' words: `--storage`, `--bucket`, `--store-option`.

Called by `volume/object_stores` and the commands. Everything that can be wrong in these words is a
ConfigError of one line. What `format` was told is kept in the volume's settings; a mount may say
otherwise. Secrets are none of these words; docs/design/object-stores says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from fsmeta.errors import ConfigError
from fsmeta.rules.settings import VolumeFormat

if TYPE_CHECKING:
    from fsdata.objects.rados.rados import RadosSettings
    from fsdata.objects.s3.s3 import S3Settings

STORAGES: Final = ("file", "s3", "rados", "mem")
SHARD: Final = "%d"  # the placeholder for the number of a shard in a bucket's name
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_POOL: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_AWS_HOST: Final = re.compile(r"(.+)\.s3(?:[.-]([a-z0-9-]+))?\.amazonaws\.com(?:\.cn)?")
_BOOLEANS: Final = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_CHECKSUMS: Final = ("crc32c", "sha256", "none")
_SECONDS_MAX: Final = 600


def _word(value: str) -> str:
    if not value:
        raise ConfigError("it is empty: give a value, or leave the option out")
    if not re.fullmatch(r"[\w.:/+=@-]+", value, re.ASCII):
        raise ConfigError("no spaces or special characters")
    return value


def _path(value: str) -> str:
    if not value:
        raise ConfigError("name a file")
    return os.path.abspath(os.path.expanduser(value))


def _boolean(value: str) -> str:
    if value not in _BOOLEANS:
        raise ConfigError("use yes or no")
    return "yes" if _BOOLEANS[value] else "no"


def _seconds(value: str) -> str:
    if not value.isdigit() or not 1 <= int(value) <= _SECONDS_MAX:
        raise ConfigError(f"use whole seconds from 1 to {_SECONDS_MAX}")
    return str(int(value))


def _checksum(value: str) -> str:
    if value not in _CHECKSUMS:
        raise ConfigError(f"use one of {', '.join(_CHECKSUMS)}")
    return value


class StoreOption(NamedTuple):
    """One `--store-option`: how it is read, and what the reference says of it."""

    parse: Callable[[str], str]
    value: str
    default: str
    meaning: str


_TIMEOUT: Final = "15"
OPTIONS: Final[Mapping[str, Mapping[str, StoreOption]]] = {
    "file": {},
    "mem": {},
    "s3": {
        "region": StoreOption(
            _word, "NAME", "as AWS programs have it", "The region of the bucket."
        ),
        "path-style": StoreOption(
            _boolean, "yes|no", "no on AWS, else yes", "The bucket is in the path, not in the host."
        ),
        "profile": StoreOption(_word, "NAME", "default", "Of AWS' configuration files."),
        "credentials": StoreOption(_path, "FILE", "", "The keys, as in ~/.aws/credentials."),
        "ca": StoreOption(_path, "FILE", "the system's", "Certificate authorities, PEM."),
        "storage-class": StoreOption(_word, "NAME", "", "Sent with each put."),
        "sse": StoreOption(_word, "AES256|aws:kms", "", "Encryption by the store, for each put."),
        "sse-kms-key": StoreOption(_word, "ID", "", "With sse=aws:kms, the key."),
        "checksum": StoreOption(
            _checksum, "|".join(_CHECKSUMS), "crc32c", "What the store verifies of each put."
        ),
        "timeout": StoreOption(_seconds, "SECONDS", _TIMEOUT, "The longest silence of the store."),
    },
    "rados": {
        "user": StoreOption(_word, "NAME", "admin", "The user, with or without `client.`"),
        "conf": StoreOption(
            _path, "FILE", "$CEPH_CONF, /etc/ceph/ceph.conf", "The configuration of the cluster."
        ),
        "keyring": StoreOption(_path, "FILE", "as conf has it", "The keys of the user."),
        "timeout": StoreOption(
            _seconds, "SECONDS", _TIMEOUT, "The longest that one request takes."
        ),
    },
}


class StoreLocation(NamedTuple):
    """`--bucket` as the volume keeps it, and the options that it implies."""

    bucket: str
    options: dict[str, str]


def parse_options(storage: str, words: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE` words as options of a kind of store. Raises: ConfigError."""
    known = OPTIONS.get(storage, {})
    out: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known:
            names = f"use one of {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"--store-option {name}: storage {storage} does not know it: {names}")
        if not equals:
            raise ConfigError(f"--store-option {name}: write {name}=VALUE")
        try:
            out[name] = known[name].parse(value)
        except ConfigError as error:
            raise ConfigError(f"--store-option {name}: {error}") from error
    return out


def parse_bucket(storage: str, bucket: str, shards: int) -> StoreLocation:
    """Raises: ConfigError."""
    if storage not in STORAGES:
        raise ConfigError(f"--storage {storage}: use one of {', '.join(STORAGES)}")
    if storage == "mem":
        return StoreLocation(bucket or "mem", {})
    if not bucket:
        raise ConfigError(f"--bucket: {_WANTED[storage]}")
    if shards and storage == "rados":
        raise ConfigError("--shards: Ceph spreads objects by itself: leave it out")
    place = _PARSERS[storage](bucket)
    if bool(shards) != (SHARD in place.bucket):
        raise ConfigError(
            f"--bucket with --shards: write {SHARD} where the number of the shard goes, "
            "and only then"
        )
    return place


_WANTED: Final = {
    "file": "name the directory that will hold the data",
    "s3": "name it, as http(s)://HOST/BUCKET or s3://BUCKET",
    "rados": "name the pool, as POOL or POOL/NAMESPACE",
}


def _parse_directory(bucket: str) -> StoreLocation:
    if "://" in bucket:
        raise ConfigError(
            f"--bucket {_shown(bucket)}: name a directory, or add --storage s3 or --storage rados"
        )
    return StoreLocation(os.path.abspath(bucket), {})


def _parse_pool(bucket: str) -> StoreLocation:
    """`[ceph://|rados://]POOL[/NAMESPACE]`."""
    scheme, separator, rest = bucket.rpartition("://")
    pool, slash, namespace = rest.strip("/").partition("/")
    names = (pool, namespace) if slash else (pool,)
    if (separator and scheme not in ("ceph", "rados")) or not all(map(_POOL.fullmatch, names)):
        raise ConfigError(f"--bucket {_shown(bucket)}: {_WANTED['rados']}")
    return StoreLocation("/".join(names), {})


def _parse_s3(bucket: str) -> StoreLocation:
    """`http(s)://HOST[:PORT]/BUCKET`, `s3://BUCKET`, `https://BUCKET.s3.REGION.amazonaws.com`."""
    try:
        parts = urlsplit(bucket.replace(SHARD, _NUMBER))
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--bucket {_shown(bucket)}: {error}") from error
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"--bucket {_shown(bucket)}: keys don't belong here: "
            "set ACCESS_KEY and SECRET_KEY, or --store-option credentials=FILE"
        )
    name, endpoint, options = _s3_names(parts, port)
    if not _BUCKET.fullmatch(name):
        raise ConfigError(f"--bucket {_shown(bucket)}: {_WANTED['s3']}")
    return StoreLocation(f"{endpoint}{name}".replace(_NUMBER, SHARD), options)


_NUMBER: Final = "shard-number"  # in place of `%d`, which is no part of a URL


def _s3_names(parts: SplitResult, port: int | None) -> tuple[str, str, dict[str, str]]:
    """Bucket, what comes before it, and the options that the URL implies."""
    path, host = parts.path.strip("/"), parts.hostname or ""
    if parts.scheme == "s3":
        return (host if not path else ""), "s3://", {}
    if parts.scheme not in ("http", "https"):
        return "", "", {}
    aws = _AWS_HOST.fullmatch(host)
    if aws is not None and not path:
        return aws[1], "s3://", {"region": aws[2]} if aws[2] else {}
    brackets = f"[{host}]" if ":" in host else host
    return path, f"{parts.scheme}://{brackets}{f':{port}' if port else ''}/", {}


_PARSERS: Final[Mapping[str, Callable[[str], StoreLocation]]] = {
    "file": _parse_directory,
    "s3": _parse_s3,
    "rados": _parse_pool,
}


def _shown(bucket: str) -> str:
    """A bucket that can be shown although a user may have put keys into it."""
    scheme, separator, rest = bucket.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else bucket


def s3_settings(bucket: str, options: Mapping[str, str]) -> S3Settings:
    """How to use a bucket of a volume; `bucket` as `parse_bucket` gave it, with its number."""
    from fsdata.objects.s3.credentials import S3Account
    from fsdata.objects.s3.http import Timeouts
    from fsdata.objects.s3.s3 import S3Settings

    endpoint, _, name = bucket.rpartition("/")
    style = options.get("path-style")
    account = S3Account(
        endpoint="" if endpoint == "s3:/" else endpoint,
        region=options.get("region", ""),
        path_style=None if style is None else _BOOLEANS[style],
        profile=options.get("profile", ""),
        credentials=options.get("credentials", ""),
        ca=options.get("ca", ""),
    )
    timeouts = Timeouts()
    if "timeout" in options:
        silent_s = float(options["timeout"])
        timeouts = Timeouts(min(timeouts.connect_s, silent_s), silent_s, 2 * silent_s)
    return S3Settings(
        name,
        account,
        storage_class=options.get("storage-class", ""),
        encryption=options.get("sse", ""),
        kms_key=options.get("sse-kms-key", ""),
        checksum=options.get("checksum", "crc32c"),
        timeouts=timeouts,
    )


def rados_settings(settings: VolumeFormat, options: Mapping[str, str]) -> RadosSettings:
    """Pool and namespace of a volume; its name is the namespace unless `--bucket` names one."""
    from fsdata.objects.rados.rados import RadosSettings

    pool, _, namespace = settings.bucket.partition("/")
    base = RadosSettings(pool, namespace or settings.name)
    wait_s = int(options.get("timeout", base.operation_s))
    return base._replace(
        user=options.get("user", base.user),
        conf=options.get("conf", os.environ.get("CEPH_CONF", base.conf)),
        keyring=options.get("keyring", ""),
        operation_s=wait_s,
        connect_s=min(wait_s, base.connect_s),
    )
