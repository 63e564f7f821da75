"""A real Ceph on loopback: one monitor, one OSD, one radosgw, ended by their pids.

Everything is below one directory and runs in the foreground under this process: no systemd, no
manager. The keys are made here and given to the monitor when it is made, because each call of the
`ceph` command takes half a second; what the monitor must be told goes through librados.

`memstore` starts in a second and forgets when its OSD ends; `bluestore` (a sparse file) keeps what
it has acknowledged, and is for the tests that kill it.

`python -m tests.support.ceph_cluster DIRECTORY POOL BUCKET…` runs one until its standard input
ends, for the benchmark and for trying things out; it prints where S3 is.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import boto3

from fsdata.objects.rados.binding import load_rados
from fsmeta.errors import ConfigError
from tests.support.redis_server import free_port

START_S: Final = 60.0
STOP_S: Final = 60.0
ACCESS_KEY: Final = "slicefs-test"
SECRET_KEY: Final = "secret-of-the-tests"  # with no `/`: it is looked for in logs and arguments
SOCKET_PATH_BYTES: Final = 107  # sun_path, unix(7)

_GLOBAL: Final = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
keyring = {base}/keyring
run_dir = {base}
crash_dir = {base}/crash
admin_socket = {base}/$name.asok
log_file = {base}/$name.log
log_to_stderr = false
err_to_stderr = true
auth_allow_insecure_global_id_reclaim = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
# who lost the OSD looks for it after a second, not after ten
objecter_tick_interval = 0.5
objecter_timeout = 1
[client]
admin_socket =
log_file =
[mon]
mon_data = {base}/mon
mon_cluster_log_file = {base}/cluster.log
mon_allow_pool_delete = true
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
mon_data_avail_warn = 2
mon_data_avail_crit = 1
# nobody else could say that the only OSD is away for good
mon_osd_down_out_interval = 0
# change at once what is to be changed: this makes the start quick
paxos_propose_interval = 0.01
paxos_min_wait = 0.01
[osd]
osd_data = {base}/osd
keyring = {base}/osd.keyring
osd_objectstore = {store}
osd_class_load_list = *
osd_class_default_list = *
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
# a radosgw that was killed leaves watches that its successor waits for
osd_client_watch_timeout = 3
osd_default_notify_timeout = 3
memstore_device_bytes = 16G
bluestore_block_size = 4G
bluestore_block_db_create = false
bluestore_block_wal_create = false
bluestore_fsck_on_mkfs = false
bluestore_cache_autotune = false
bluestore_cache_size = 128M
[client.rgw]
# without tcp_nodelay Nagle's algorithm and delayed ACKs make a small GET take 44 ms
rgw_frontends = beast endpoint=127.0.0.1:{s3} tcp_nodelay=1
rgw_data = {base}/rgw
rgw_thread_pool_size = 32
rgw_rados_pool_pg_num_min = 1
rgw_enable_gc_threads = false
rgw_enable_lc_threads = false
rgw_enable_quota_threads = false
rgw_run_sync_thread = false
rgw_dynamic_resharding = false
rgw_enable_usage_log = false
rgw_override_bucket_index_max_shards = 1
rgw_s3_auth_use_sts = {tokens}
rgw_sts_key = abcdefghijklmnop
log_file = {base}/rgw.log
admin_socket = {base}/rgw.asok
"""
_CAPS: Final = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx", "mgr": "allow rw"},
    "client.reader": {"mon": "allow r", "osd": "allow r"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
}


class CephCluster:
    """A cluster in `directory`; `with` starts and stops it. Its daemons can be killed one by one.

    Without `gateway` there is no S3, and it starts in half the time. With `tokens` radosgw knows
    session tokens, and calls every wrong key AccessDenied.
    """

    def __init__(
        self,
        directory: Path,
        store: str = "memstore",
        gateway: bool = True,
        tokens: bool = False,
    ) -> None:
        longest = f"{directory}/client.admin.asok"
        assert len(longest) <= SOCKET_PATH_BYTES, f"too long for a unix socket: {longest}"
        self.base = directory
        self.conf = directory / "ceph.conf"
        self.s3_port = free_port()
        self._store = store
        self._gateway = gateway
        self._tokens = tokens
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._admin: Any = None
        self._has_role = False
        self._osd_uuid = str(uuid.uuid4())

    @staticmethod
    def missing(gateway: bool = True) -> str:
        """What is not installed, in words; empty where nothing is missing."""
        programs = ["ceph-mon", "ceph-osd", "monmaptool", *(["radosgw"] if gateway else [])]
        gone = [program for program in programs if shutil.which(program) is None]
        try:
            load_rados()
        except ConfigError as error:
            gone.append(str(error))
        return ", ".join(gone)

    @property
    def endpoint(self) -> str:
        """Where radosgw answers."""
        return f"http://127.0.0.1:{self.s3_port}"

    def start(self) -> None:
        """Returns when the OSD takes writes and S3 answers."""
        self._write_settings()
        self._make_monitor()
        self._spawn("mon", "ceph-mon", "-i", "a")
        self._make_osd()
        self.command(prefix="osd new", uuid=self._osd_uuid, id=0)
        self.start_osd()
        if self._gateway:
            self.start_gateway()
            self.add_user("test", ACCESS_KEY, SECRET_KEY)

    def _write_settings(self) -> None:
        ports = {"v1": free_port(), "v2": free_port(), "s3": self.s3_port}
        tokens = str(self._tokens).lower()
        text = _GLOBAL.format(
            fsid=uuid.uuid4(), base=self.base, store=self._store, tokens=tokens, **ports
        )
        self.conf.write_text(text)
        for name in ("mon", "osd", "rgw", "crash"):
            (self.base / name).mkdir()
        keys = {name: _key() for name in _CAPS}
        lines = []
        for name, caps in _CAPS.items():
            lines += [f"[{name}]", f"\tkey = {keys[name]}"]
            lines += [f'\tcaps {what} = "{allowed}"' for what, allowed in caps.items()]
        (self.base / "keyring").write_text("\n".join(lines) + "\n")
        (self.base / "osd.keyring").write_text(f"[osd.0]\n\tkey = {keys['osd.0']}\n")

    def _make_monitor(self) -> None:
        address = self._line("mon_host").replace("[", "").replace("]", "")
        monmap = self.base / "monmap"
        self._run(
            *("monmaptool", "--create", "--fsid", self._line("fsid")),
            *("--addv", "a", f"[{address}]", "--clobber", monmap),
        )
        keyring = self.base / "keyring"
        self._run(
            *("ceph-mon", "-c", self.conf, "-i", "a", "--mkfs"),
            *("--monmap", monmap, "--keyring", keyring),
        )

    def _make_osd(self) -> None:
        self._run(
            *("ceph-osd", "-c", self.conf, "-i", "0", "--mkfs", "--no-mon-config"),
            *("--osd-uuid", self._osd_uuid),
        )

    def _line(self, name: str) -> str:
        lines = self.conf.read_text().splitlines()
        return next(line.partition(" = ")[2] for line in lines if line.startswith(f"{name} = "))

    def _run(self, *words: str | Path) -> str:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        return done.stdout

    def _spawn(self, name: str, program: str, *words: str) -> None:
        with (self.base / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                [program, "-c", str(self.conf), "-f", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def _wait(self, name: str, what: str, condition: Callable[[], bool]) -> None:
        """Until `condition()`, as long as the daemon `name` runs."""
        deadline = time.monotonic() + START_S
        while not condition():
            output = self.base / f"{name}.out"
            assert self._processes[name].poll() is None, output.read_text()
            assert time.monotonic() < deadline, f"{what}: {output.read_text()}"
            time.sleep(0.02)

    def connect(self, user: str = "client.admin") -> Any:
        """A librados connection of the caller's own."""
        settings = {"client_mount_timeout": "30", "rados_osd_op_timeout": "30"}
        connection = load_rados().Rados(conffile=str(self.conf), name=user, conf=settings)
        connection.connect()
        return connection

    def command(self, **words: object) -> bytes:
        """Have the monitor do something; what it printed."""
        if self._admin is None:
            self._admin = self.connect()
        code, out, why = self._admin.mon_command(json.dumps(words), b"", timeout=30)
        assert code == 0, (words, code, why)
        assert isinstance(out, bytes)
        return out

    def make_pool(self, name: str) -> None:
        """A pool that takes writes."""
        self.command(prefix="osd pool create", pool=name, pg_num=8, size=1)
        self.command(prefix="osd pool application enable", pool=name, app="slicefs")
        self._admin.wait_for_latest_osdmap()

    def make_bucket(self, name: str) -> None:
        """A bucket of the user `test`."""
        with closing(self._client("s3")) as client:
            client.create_bucket(Bucket=name)

    def _client(self, service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )

    def add_user(self, name: str, access_key: str, secret_key: str) -> None:
        """An S3 user, or one more key of one that exists."""
        known = self._radosgw_admin("user", "list")
        action = ("key", "create") if name in json.loads(known) else ("user", "create")
        self._radosgw_admin(
            *(*action, "--uid", name, "--display-name", name, "--key-type", "s3"),
            *("--access-key", access_key, "--secret-key", secret_key),
        )

    def remove_key(self, name: str, access_key: str) -> None:
        """From now on this key is wrong."""
        self._radosgw_admin(
            *("key", "rm", "--uid", name, "--key-type", "s3", "--access-key", access_key)
        )

    def session_keys(self, name: str = "test") -> dict[str, str]:
        """Keys of a role that end by themselves: AccessKeyId, SecretAccessKey, SessionToken."""
        if not self._has_role:
            self._has_role = True
            may_assume = {"AWS": [f"arn:aws:iam:::user/{name}"]}
            self._radosgw_admin(
                *("role", "create", "--role-name", "tests-role", "--assume-role-policy-doc"),
                _policy("sts:AssumeRole", Principal=may_assume),
            )
            self._radosgw_admin(
                *("role-policy", "put", "--role-name", "tests-role", "--policy-name", "all"),
                *("--policy-doc", _policy("s3:*", Resource="arn:aws:s3:::*")),
            )
        arn = "arn:aws:iam:::role/tests-role"
        with closing(self._client("sts")) as client:
            answer = client.assume_role(RoleArn=arn, RoleSessionName="tests", DurationSeconds=900)
        keys = answer["Credentials"]
        return {each: keys[each] for each in ("AccessKeyId", "SecretAccessKey", "SessionToken")}

    def _radosgw_admin(self, *words: str) -> str:
        return self._run("radosgw-admin", "-c", self.conf, *words)

    def start_osd(self) -> None:
        """Returns when the monitor has it up: from then on it takes writes."""
        self._spawn("osd", "ceph-osd", "-i", "0")

        def is_up() -> bool:
            state = json.loads(self.command(prefix="osd stat", format="json"))
            return int(state["num_up_osds"]) == 1

        self._wait("osd", "the OSD does not come up", is_up)

    def start_gateway(self) -> None:
        """Returns when S3 answers."""
        self._spawn("rgw", "radosgw", "-n", "client.rgw")
        self._wait("rgw", "radosgw does not answer", self._answers)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.s3_port, timeout=60)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill_osd(self) -> None:
        """SIGKILL; the monitor is told, because nobody else would notice the only one's death."""
        self.kill("osd")
        self.command(prefix="osd down", ids=["0"])

    def kill(self, name: str) -> None:
        """SIGKILL the daemon `mon`, `osd` or `rgw`."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def pid(self, name: str) -> int:
        """The process of the daemon `mon`, `osd` or `rgw`."""
        return self._processes[name].pid

    def osd_counters(self) -> dict[str, int]:
        """The OSD's own counts since it started: `op_r`, `op_w`, …"""
        answer = self._run(
            "ceph", "--admin-daemon", self.base / "osd.0.asok", "perf", "dump", "osd"
        )
        counters = json.loads(answer)["osd"]
        assert isinstance(counters, dict)
        return counters

    def stop(self) -> None:
        """End everything; the store on disk goes with the directory, so nothing is saved."""
        if self._admin is not None:
            self._admin.shutdown()
            self._admin = None
        for name in ("rgw", "osd", "mon"):
            if name in self._processes:
                self.kill(name)

    def __enter__(self) -> CephCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A new directory whose name leaves room for unix sockets; pytest's own are too deep."""
    path = Path(tempfile.mkdtemp(prefix="slicefs-ceph-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _policy(action: str, **more: object) -> str:
    statement = {"Effect": "Allow", "Action": [action], **more}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _key() -> str:
    """A cephx key: type AES, no creation time, sixteen random bytes."""
    return base64.b64encode(struct.pack("<HIIH", 1, 0, 0, 16) + os.urandom(16)).decode()


def main(words: list[str]) -> None:
    """Run a cluster with a pool and buckets until standard input ends."""
    directory, pool, *buckets = words
    with CephCluster(Path(directory)) as cluster:
        cluster.make_pool(pool)
        for bucket in buckets:
            cluster.make_bucket(bucket)
        print(cluster.endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
