"""The one error of the driver: a gRPC status and a line that names the thing and the remedy."""

from __future__ import annotations

from typing import Any

import grpc

Code = grpc.StatusCode


class CsiError(Exception):
    """A call fails with the status `code`; the text is for the user and holds no secret."""

    def __init__(self, code: Any, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def invalid(text: str) -> CsiError:
    """The request can't be right, whatever the state of the volume is."""
    return CsiError(Code.INVALID_ARGUMENT, text)
