"""Tells kubelet of the driver, as node-driver-registrar does, whose program is in no registry here.

python -m tests.csi.kube_registrar DRIVER_SOCKET REGISTRATION_DIRECTORY
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc

from csi.services.table import DRIVER_NAME


def main() -> None:
    """Serve kubelet's registration protocol until killed."""
    endpoint, directory = sys.argv[1:]
    path = os.path.join(directory, f"{DRIVER_NAME}-reg.sock")
    with suppress(FileNotFoundError):
        os.unlink(path)
    server = grpc.server(ThreadPoolExecutor(2))
    info = _info("CSIPlugin", DRIVER_NAME, endpoint, "1.0.0")
    handlers = {"GetInfo": _answer(info), "NotifyRegistrationStatus": _answer(b"")}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("pluginregistration.Registration", handlers),)
    )
    server.add_insecure_port(f"unix://{path}")
    server.start()
    server.wait_for_termination()


def _info(*texts: str) -> bytes:
    """A PluginInfo: type, name, endpoint and version are its fields 1 to 4."""
    encoded = [text.encode() for text in texts]
    return b"".join(
        bytes([number << 3 | 2, len(text)]) + text for number, text in enumerate(encoded, 1)
    )


def _answer(content: bytes) -> Any:
    def handle(request: bytes, context: Any) -> bytes:
        del context
        print(f"kubelet says {request!r}", flush=True)
        return content

    return grpc.unary_unary_rpc_method_handler(handle)


if __name__ == "__main__":
    main()
