"""`slicefs-csi`: the driver's command line. It puts the parts together and runs until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from csi.clients.mounting import can_survive
from csi.clients.node_volumes import NodeVolumes
from csi.clients.program import Program
from csi.clients.starters import HostStarter, PodStarter, Starter
from csi.cluster.api import ACCOUNT, KubeApi
from csi.cluster.pods import MountPods
from csi.host.commands import find_slicefs
from csi.server.numbers import Numbers, NumbersServer
from csi.server.server import Server
from csi.services.controller import Controller
from csi.services.identity import Identity
from csi.services.node import Node
from csi.services.staging import NodeStaging
from csi.volumes.snapshots import Snapshots
from csi.volumes.stores import ControllerVolumes
from csi.volumes.volumes import Volumes

log = logging.getLogger(__name__)

_STATE: Final = "/var/lib/slicefs-csi"
_HEAL_S: Final = 15.0
_STOP_S: Final = 20.0
_NODE_ID_BYTES_MAX: Final = 192  # the specification's
_UNIX: Final = "unix://"


class UsageError(Exception):
    """An option can't be right."""


def main() -> None:
    """The `slicefs-csi` program."""
    options = _parser().parse_args()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        _check(options)
        asyncio.run(_serve(options))
    except (UsageError, OSError, RuntimeError) as error:
        print(f"slicefs-csi: {error}", file=sys.stderr)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slicefs-csi", description="The CSI driver of SliceFS, for Kubernetes."
    )
    add = parser.add_argument
    add("--endpoint", required=True, metavar="unix:///SOCKET", help="the socket to serve")
    add("--node-id", required=True, metavar="ID", help="the name of this node")
    add("--metrics", metavar="HOST:PORT", help="serve /metrics and /healthz there")
    add("--state-dir", default=_STATE, metavar="DIR", help=f"records and mounts; {_STATE}")
    add("--services", default="all", choices=["all", "controller", "node"], help="what to serve")
    add("--heal-interval", type=float, default=_HEAL_S, metavar="SECONDS",
        help=f"seconds between checks of the clients; {_HEAL_S:.0f}")  # fmt: skip
    add("--allow-local-stores", action="store_true",
        help="let secrets name SQLite files and directories of the node")  # fmt: skip
    add("--mount-pod", metavar="FILE",
        help="start clients in pods like this one (JSON); they outlive the driver")  # fmt: skip
    add("--upgrade-clients", nargs="?", const="true", default="false", choices=["true", "false"],
        help="move clients to new pods where --mount-pod has changed, one by one")  # fmt: skip
    add("--service-account", default=ACCOUNT, metavar="DIR",
        help=f"token, ca.crt and namespace for the Kubernetes API; {ACCOUNT}")  # fmt: skip
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raises: UsageError."""
    if not options.endpoint.startswith(_UNIX + "/"):
        raise UsageError(f"--endpoint {options.endpoint}: write unix:///PATH of a socket")
    size = len(options.node_id.encode())
    if not 0 < size <= _NODE_ID_BYTES_MAX:
        raise UsageError(f"--node-id: 1 to {_NODE_ID_BYTES_MAX} bytes, not {size}")
    if not 0.1 <= options.heal_interval <= 3600:
        raise UsageError("--heal-interval: 0.1 to 3600 seconds")
    if options.metrics is not None:
        _address(options.metrics)


def _address(text: str) -> tuple[str, int]:
    """Raises: UsageError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 <= int(port) < 1 << 16):
        raise UsageError(f"--metrics {text}: write HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def _version() -> str:
    try:
        return version("slicefs")
    except PackageNotFoundError:
        return "0"


def _starter(options: argparse.Namespace, program: Program) -> Starter:
    """What starts the clients of this node. Raises: OSError, RuntimeError."""
    if options.mount_pod is None:
        return HostStarter(program)
    api = KubeApi.of_this_pod(os.environ, options.service_account)
    template = MountPods.read_template(options.mount_pod)
    return PodStarter(MountPods(api, template, options.node_id))


async def _serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; clients stay. Raises: OSError, RuntimeError."""
    state = os.path.abspath(options.state_dir)
    os.makedirs(state, 0o700, exist_ok=True)
    slicefs = find_slicefs()
    program = Program(slicefs)
    volumes = NodeVolumes(os.path.join(state, "volumes"), program, _starter(options, program))
    staging = NodeStaging(volumes, program)
    node = Node(options.node_id, volumes, staging, options.allow_local_stores)
    identity = Identity(_version(), slicefs, options.services != "node")
    numbers = Numbers()
    server = Server(numbers)
    server.add(identity)
    if options.services != "controller":
        server.add(node)
    if options.services != "node":
        directories = Volumes(program)
        stores = ControllerVolumes(os.path.join(state, "stores"), program)
        snapshots = Snapshots(program, directories)
        server.add(Controller(stores, directories, snapshots, options.allow_local_stores))
    bad = 0

    def metrics() -> tuple[int, str]:
        records = len(volumes.all()[0])
        gauges = {"volumes": records, "volumes_abnormal": bad, "heals_total": staging.heals}
        return 200, numbers.text(gauges)

    def health() -> tuple[int, str]:
        return (200, "ok\n") if identity.is_ready() else (503, "no slicefs or no /dev/fuse\n")

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if options.metrics is not None:
        pages = NumbersServer({"/metrics": metrics, "/healthz": health})
        await pages.start(*_address(options.metrics))
    socket = options.endpoint.removeprefix(_UNIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket)  # of a driver that was killed
    os.makedirs(os.path.dirname(socket), exist_ok=True)
    await server.start(options.endpoint)
    if options.services != "controller" and not can_survive():
        log.warning("Linux %s: clients have no supervisor before 6.16", os.uname().release)
    log.info("serving %s at %s", options.services, options.endpoint)
    while not stopped.is_set():
        if options.services != "controller":
            bad = await node.heal()
            if options.upgrade_clients == "true":
                await node.renew()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopped.wait(), options.heal_interval)
    await server.stop(_STOP_S)


if __name__ == "__main__":
    main()
