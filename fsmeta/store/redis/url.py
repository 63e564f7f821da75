"""Where a metadata URL says that Redis is: one server, Sentinels, or a cluster.

    redis://…  rediss://…  unix://…                       one server
    redis+sentinel://[USER:PASSWORD@]HOST:PORT,…/MASTER/DB       also rediss+sentinel
    redis://[USER:PASSWORD@]MASTER,HOST,…:PORT/DB                the same, as JuiceFS writes it
    redis+cluster://[USER:PASSWORD@]HOST:PORT,…/NAME             also rediss+cluster

Called by `redis/topology` and by what checks command lines. Pure functions.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
HOSTS_MAX: Final = 100  # more than a user lists by hand
SENTINEL: Final = "+sentinel"
CLUSTER: Final = "+cluster"
SCHEMES: Final = (
    *("redis", "rediss", "unix"),
    *(f"{scheme}{kind}" for scheme in ("redis", "rediss") for kind in (SENTINEL, CLUSTER)),
)
SENTINEL_WORDS: Final = ("sentinel_username", "sentinel_password")  # `?name=value`
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a master; of a volume in a cluster
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::(\d{1,5}))?")

HostPort = tuple[str, int]


class RedisUrl(NamedTuple):
    """A URL taken apart."""

    plain: str  # the same for redis-py: one server, with what all of them share
    hosts: tuple[HostPort, ...] = ()  # Sentinels, or nodes of the cluster; () for one server
    master: str = ""  # what the Sentinels call it; "" where there are none
    volume: str = ""  # the name in front of all keys of a cluster; "" where there is none
    sentinel_words: tuple[tuple[str, str], ...] = ()  # options with which to log in to Sentinels


def parse(url: str) -> RedisUrl:
    """Raises: ConfigError."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    secret, at, place = place.rpartition("@")
    hosts, _, path = place.partition("/")
    base = scheme.partition("+")[0]
    begin = f"{base}://{secret}{at}"
    if scheme.endswith(SENTINEL):
        master, _, number = path.partition("/")
        found = _hosts(url, hosts, SENTINEL_PORT)
    elif scheme.endswith(CLUSTER):
        if not _NAME.fullmatch(path):
            raise _wrong(url, "name the volume's keys: redis+cluster://HOST:PORT,…/NAME")
        found = _hosts(url, hosts, REDIS_PORT)
        return RedisUrl(_plain(begin, found[0], "0", query), found, volume=path)
    elif base != "unix" and "," in hosts:
        master, _, others = hosts.partition(",")
        number, found = path, _hosts(url, others, _last_port(others))
    else:
        return RedisUrl(url)
    if not _NAME.fullmatch(master):
        raise _wrong(url, "name the master: redis+sentinel://HOST:PORT,…/MASTER/DB")
    words = parse_qsl(query, keep_blank_values=True)
    query = urlencode([word for word in words if word[0] not in SENTINEL_WORDS])
    secrets = tuple(
        (name.removeprefix("sentinel_"), value) for name, value in words if name in SENTINEL_WORDS
    )
    return RedisUrl(
        _plain(begin, found[0], number or "0", query), found, master, sentinel_words=secrets
    )


def _plain(begin: str, host: HostPort, number: str, query: str) -> str:
    name = f"[{host[0]}]" if ":" in host[0] else host[0]
    return f"{begin}{name}:{host[1]}/{number}{'?' if query else ''}{query}"


def _last_port(hosts: str) -> int:
    """The port behind the last host, which is that of all hosts."""
    found = _HOST.fullmatch(hosts.rpartition(",")[2])
    return int(found[2]) if found and found[2] else SENTINEL_PORT


def _hosts(url: str, text: str, port: int) -> tuple[HostPort, ...]:
    """`host[:port],…`. Raises: ConfigError."""
    hosts: list[HostPort] = []
    for word in text.split(","):
        found = _HOST.fullmatch(word)
        if not found or not found[1] or not 0 < int(found[2] or port) < 1 << 16:
            raise _wrong(url, f"{word!r} is no HOST:PORT")
        hosts.append((found[1].strip("[]"), int(found[2] or port)))
    if len(hosts) > HOSTS_MAX:
        raise _wrong(url, f"name at most {HOSTS_MAX} hosts")
    return tuple(hosts)


def _wrong(url: str, why: str) -> ConfigError:
    return ConfigError(f"can't read metadata URL {shown_url(url)}: {why}")
