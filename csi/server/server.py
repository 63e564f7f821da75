"""The gRPC server: calls of the services by name, errors as statuses, one log line for each.

A call that the caller gives up goes on to its end: a step that is half done is worse than one that
is done for no caller, and the next call finds its result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from csi.errors import Code, CsiError
from csi.server.numbers import Numbers
from csi.services.table import Call, Service

log = logging.getLogger(__name__)

_QUIET: Final = ("Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetCapabilities")


class Server:
    """Serves `services` at an endpoint."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._server = grpc.aio.server()
        self._running: set[asyncio.Task[Any]] = set()

    def add(self, service: Service) -> None:
        """Serve this, too."""
        handlers = {name: self._handler(name, call) for name, call in service.calls().items()}
        generic = grpc.method_handlers_generic_handler(service.name, handlers)
        self._server.add_generic_rpc_handlers((generic,))

    async def start(self, endpoint: str) -> None:
        """Raises: RuntimeError where the endpoint can't be listened to."""
        if not self._server.add_insecure_port(endpoint):
            raise RuntimeError(f"can't listen at {endpoint}")
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Take no more calls, and end those that are under way."""
        await self._server.stop(seconds)
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    def _handler(self, name: str, call: Call) -> Any:
        method, request_type = call

        async def handle(request: Any, context: Any) -> Any:
            task = asyncio.ensure_future(self._answer(name, method, request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            code, found = await asyncio.shield(task)
            if code is not Code.OK:
                await context.abort(code, found)
            return found

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=request_type.FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    async def _answer(
        self, name: str, method: Callable[[Any], Awaitable[Any]], request: Any
    ) -> tuple[Any, Any]:
        """A status, and the response or the reason. Secrets and contexts are not logged."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        try:
            result: tuple[Any, Any] = (Code.OK, await method(request))
        except CsiError as error:
            result = (error.code, error.text)
        except OSError as error:
            log.warning("%s: %s", name, error)
            result = (Code.UNAVAILABLE, f"{error.strerror or error}: try again")
        except Exception as error:
            log.exception("%s", name)
            result = (Code.INTERNAL, f"unforeseen, {type(error).__name__}: see the driver's log")
        seconds = clock() - begin
        code = result[0].name
        self._numbers.note(name, code, seconds)
        if name not in _QUIET or code != "OK":
            what = getattr(request, "volume_id", "") or getattr(request, "name", "")
            reason = "" if code == "OK" else f": {result[1]}"
            log.info("%s %r %s in %.3f s%s", name, what, code, seconds, reason)
        return result
