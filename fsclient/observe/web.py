"""The web page of a mount: one HTML file, and the JSON that it draws.

The sessions and quotas of the volume cost requests to the metadata store, so they are read at most
every FRESH_S, by a thread that a request for JSON starts: no request waits for the store.

Threading: `json` from the HTTP thread; what was read is replaced whole.
"""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from typing import Any, Final, NamedTuple

from fsclient.background.quota_alerts import near_full
from fsclient.observe.registry import Metrics
from fsclient.observe.routes import Reply, Route
from fsclient.volume.quota_names import as_json, titles
from fsmeta.errors import StoreError
from fsmeta.latency import upper_bound
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

FRESH_S: Final = 5.0
SHOWN_MAX: Final = 200  # sessions, and quotas nearly full: a page for people
_SESSION_FIELDS: Final = ("host", "pid", "mountpoint", "started", "does")


class _VolumeNumbers(NamedTuple):
    """What the metadata store said last."""

    sessions: tuple[dict[str, Any], ...] = ()
    session_count: int = 0
    quota_count: int = 0
    quotas: tuple[dict[str, Any], ...] = ()


class WebPage:
    """What `--web` serves."""

    def __init__(self, metrics: Metrics, meta: Meta, mountpoint: str, runtime: Runtime) -> None:
        self._metrics = metrics
        self._meta = meta
        self._mountpoint = mountpoint
        self._runtime = runtime
        self._volume = _VolumeNumbers()
        self._asked = -FRESH_S
        self._asking = runtime.lock()  # held by the thread that reads
        self._page = files("fsclient.observe").joinpath("page.html").read_bytes()

    def routes(self) -> dict[str, Route]:
        """`/` and `/api/stats`."""
        return {
            "/": lambda: Reply("text/html; charset=utf-8", self._page),
            "/api/stats": lambda: Reply("application/json", self.json()),
        }

    def json(self) -> bytes:
        """The numbers as counters since the mount began; the page makes rates of two answers."""
        self._refresh()
        latencies = [
            {
                "name": series.name,
                "labels": series.labels,
                "count": series.reading.requests,
                "seconds": series.reading.seconds,
                "buckets": {
                    f"{upper_bound(index):.9g}": count
                    for index, count in enumerate(series.reading.buckets)
                    if count
                },
            }
            for series in self._metrics.latencies()
        ]
        shown = {
            "mountpoint": self._mountpoint,
            "volume": self._meta.format.name,
            "time": self._runtime.now_ns() / 1e9,
            "numbers": self._metrics.collect(),
            "latencies": latencies,
            **self._volume._asdict(),
        }
        return json.dumps(shown).encode()

    def _refresh(self) -> None:
        now = self._runtime.monotonic()
        if now - self._asked >= FRESH_S and self._asking.acquire(blocking=False):
            self._asked = now
            self._runtime.spawn("web-volume", self._read)

    def _read(self) -> None:
        try:
            self._volume = self._ask()
        except (StoreError, OSError) as error:
            log.debug("sessions and quotas for the web page: %s", error)
        finally:
            self._asking.release()

    def _ask(self) -> _VolumeNumbers:
        records = self._meta.sessions.all()
        sessions = tuple(
            {"id": each.id, **{name: each.info.get(name) for name in _SESSION_FIELDS}}
            for each in records[:SHOWN_MAX]
        )
        count, near = near_full(self._meta) if self._meta.has_quotas else (0, [])
        near = near[:SHOWN_MAX]
        names = titles(self._meta, [each.node for each in near])
        quotas = tuple(as_json(each, names[each.node]) for each in near)
        return _VolumeNumbers(sessions, len(records), count, quotas)

    def numbers(self) -> dict[str, float]:
        """For `.stats`: how many sessions there were when the page last asked."""
        return {"sessions": self._volume.session_count}
