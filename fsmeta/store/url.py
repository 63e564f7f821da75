"""Metadata URLs as they may be shown: complete but for the secrets.

Called by the engines and the commands, for messages and for what ps(1) shows.
"""

from __future__ import annotations

from typing import Final

TLS_FILES: Final = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ca_path")
# `?name=value` of a server's URL that is no secret; user names and credentials are not shown
_SHOWN: Final = ("db", *TLS_FILES, "ssl_cert_reqs", "ssl_check_hostname")


def shown_url(url: str) -> str:
    """A metadata URL that can be used again and shown to anyone: without user and password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url.rpartition("@")[2]
    place, _, query = rest.partition("?")
    if "@" in query:  # a raw `?` in a password, or a raw `@` in a parameter
        return f"{scheme}{separator}"
    words = [word for word in query.split("&") if word.partition("=")[0] in _SHOWN]
    return f"{scheme}{separator}{place.rpartition('@')[2]}{'?' if words else ''}{'&'.join(words)}"
