"""What a mount was told of traces, on the command line or by OpenTelemetry's environment.

The variables are those that OpenTelemetry's own libraries obey. Whatever else the exporter takes
from its environment (headers, certificates, compression, timeout) it reads itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from fsmeta.errors import ConfigError

PATH: Final = "/v1/traces"  # what a collector serves, below the address that users know
PROTOCOL: Final = "http/protobuf"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TraceOptions(NamedTuple):
    """Where traces go."""

    endpoint: str  # the whole URL
    ratio: float = 1.0  # of all requests
    asked: bool = True  # on the command line; False: the environment says so
    obstacle: str = ""  # why the mount can't trace though the environment says so

    def shown(self) -> str:
        """The endpoint for the log."""
        return self.endpoint.partition("?")[0]


def parse_trace(
    url: str | None, ratio: float | None, environment: Mapping[str, str]
) -> TraceOptions | None:
    """What `--trace`, `--trace-sample` and the environment say; None: no traces.

    Raises: ConfigError.
    """
    share = _ratio(environment) if ratio is None else ratio
    if url is not None:
        return TraceOptions(_whole(url, "--trace"), share) if share else None
    found = _from(environment)
    if found is None and ratio is not None:
        raise ConfigError("--trace-sample: there are no traces: add --trace URL")
    return found._replace(ratio=share) if found is not None and share else None


def _from(environment: Mapping[str, str]) -> TraceOptions | None:
    """Where the environment has traces go; the ratio is not looked at."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return None
    whole, base = environment.get(_TRACES_ENDPOINT, ""), environment.get(_ENDPOINT, "")
    if not whole and not base:
        return None
    protocol = next(filter(None, (environment.get(name) for name in _PROTOCOLS)), PROTOCOL)
    if protocol != PROTOCOL:
        return TraceOptions("", asked=False, obstacle=f"the protocol is to be {protocol}")
    try:
        endpoint = _checked(whole, _TRACES_ENDPOINT) if whole else _whole(base, _ENDPOINT)
    except ConfigError as error:
        return TraceOptions("", asked=False, obstacle=str(error))
    return TraceOptions(endpoint, asked=False)


def _ratio(environment: Mapping[str, str]) -> float:
    """The share that `OTEL_TRACES_SAMPLER` names; all, where it is another sampler."""
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").strip().removeprefix("parentbased_")
    if sampler == "always_off":
        return 0.0
    if sampler != "traceidratio":
        return 1.0
    try:
        return min(1.0, max(0.0, float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1"))))
    except ValueError:
        return 1.0


def _whole(base: str, source: str) -> str:
    """The URL below `base` that takes traces; `base` itself where it is that."""
    url = _checked(base, source).rstrip("/")
    return url if url.endswith(PATH) else url + PATH


def _checked(url: str, source: str) -> str:
    """`url`. Raises: ConfigError for one that can't be used or has a secret in it."""
    example = "write a URL such as http://127.0.0.1:4318"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{source}: {example}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{source}: {example}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{source}: keys do not belong into the URL: put them into OTEL_EXPORTER_OTLP_HEADERS"
        )
    return url
