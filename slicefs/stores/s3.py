"""A tree in an S3 bucket, below a prefix: `s3://BUCKET/PREFIX`, and `r2://`, `gs://` by address.

Objects are read, listed and put through the volume's own thin client with its retries and its limit
on requests at a time (`fsdata/objects/s3`); boto3 does what is rare: parts of large objects and
copies. Keys, region and address come from the environment and the AWS profile.

Threading: any method from any thread. Connections are made at the first use, anew after a fork.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fsclient.volume.object_stores import TIMEOUT_S, Pacing, stacked
from fsdata.objects.contract import KeysRefused, NoPlace, Throttled, Unreached
from fsdata.objects.s3.credentials import Keys, S3Account
from fsdata.objects.s3.errors import NoSuchBucket
from fsdata.objects.s3.http import Timeouts
from fsdata.objects.wrappers import Backoff, Retrying
from fsmeta.errors import ConfigError, ObjectMissing, Refused, StoreError
from slicefs.client.parallel import RUNTIME, Readers
from slicefs.client.ranges import MAX_GAP_BYTES, WHOLE, Item, MergedRead, cut, plan
from slicefs.stores.s3_writer import S3Writer
from slicefs.stores.seekable import SeekableReader
from slicefs.stores.tree import (
    Buffer,
    Entry,
    FirstFiles,
    FlatTree,
    Info,
    Writer,
    clean_path,
    write_all,
)

if TYPE_CHECKING:
    from fsdata.objects.contract import ObjectInfo, ObjectStore
    from fsdata.objects.s3.listing import ListingPage

READERS: Final = 16  # requests at a time: most of a small GET is waiting
READ_BYTES: Final = 8 << 20  # of one GET: larger spans are several
BUFFER_BYTES: Final = 1 << 20
COPY_BYTES_MAX: Final = 5 << 30  # CopyObject takes no more
REACH_S: Final = 10.0  # two attempts to connect: a wrong address is found out soon
DELETES: Final = 500  # keys of one call, as of one request of `fsdata/objects/s3`


class BucketTree(NamedTuple):
    """Where objects are; all of it can be pickled, and nothing is secret."""

    url: str  # of the tree
    name: str
    prefix: str  # "" or ending in `/`
    account: S3Account = S3Account()
    checksum: str = "crc32c"  # of `fsdata/objects/s3`: what the store is told of a PUT
    timeout_s: float = TIMEOUT_S  # how long a request is repeated


class _Making:
    """One thread makes what many want: a session of boto3 takes 0.1 s of processor time."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """In a forked child: the parent's other threads may have held the lock."""
        self.lock = RUNTIME.lock()


_MAKING: Final = _Making()
os.register_at_fork(after_in_child=_MAKING.renew)


class Links:
    """What a process has open to a bucket."""

    def __init__(self, bucket: BucketTree) -> None:
        """Raises: ConfigError."""
        try:
            from fsdata.objects.s3.s3 import S3Objects, S3Settings
        except ImportError as error:
            raise ConfigError("s3:// needs a package: pip install 'slicefs[s3]'") from error
        self.pid = os.getpid()
        self.keys = Keys(RUNTIME, bucket.account)
        settings = S3Settings(bucket.name, bucket.account, checksum=bucket.checksum, patient=False)
        objects, pacing = S3Objects(RUNTIME, settings, self.keys), Pacing(bucket.timeout_s)
        self.bucket = objects
        self.stack = stacked(objects, "s3", RUNTIME, pacing)
        self._account = bucket.account
        self._boto: Any = None

    @property
    def objects(self) -> ObjectStore:
        """The thin client with its wrappers."""
        return self.stack.store

    def boto(self) -> Any:
        """boto3's client, with retries of its own."""
        if self._boto is None:
            with _MAKING.lock:
                if self._boto is None:
                    self._boto = _boto_client(self._account, self.keys)
        return self._boto

    def close(self) -> None:
        """Close connections."""
        self.stack.leaving.set()
        self.objects.close()
        if self._boto is not None:
            self._boto.close()


def _boto_client(account: S3Account, keys: Keys) -> Any:
    """A client that repeats what the store is too busy for."""
    from botocore.config import Config

    base = keys.client()
    settings = base.meta.config
    key = keys.current()
    from fsdata.objects.s3.credentials import new_session

    return new_session(account).client(
        "s3",
        endpoint_url=base.meta.endpoint_url,
        region_name=base.meta.region_name,
        aws_access_key_id=key.access,
        aws_secret_access_key=key.secret,
        aws_session_token=key.token or None,
        verify=account.ca or None,
        config=Config(
            s3=settings.s3,
            signature_version="s3v4",
            connect_timeout=10,
            read_timeout=60,
            retries={"max_attempts": 10, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


class S3Tree:
    """Objects of a bucket below a prefix."""

    def __init__(self, bucket: BucketTree) -> None:
        self._bucket = bucket
        self._links: Links | None = None
        self._readers = Readers(READERS)

    @property
    def url(self) -> str:
        """See `Tree`."""
        return self._bucket.url

    @property
    def bucket(self) -> BucketTree:
        """Where the objects are."""
        return self._bucket

    def require_reachable(self) -> None:
        """Ask the server for the bucket, and give up soon where no way leads to it.

        Raises: ConfigError. Any other answer is fine: other calls say what is wrong.
        """
        links = self.links()
        impatient = Retrying(RUNTIME, links.bucket, Backoff(total_s=REACH_S))
        links.bucket.set_timeouts(Timeouts(silent_s=REACH_S / 2, whole_s=REACH_S))
        try:
            impatient.head(f"{self._bucket.prefix}/")
        except Unreached as error:
            raise ConfigError(
                f"{self.url}: {error}: check the address (AWS_ENDPOINT_URL), and whether the store "
                "runs and can be reached from here"
            ) from error
        except NoSuchBucket as error:
            raise ConfigError(f"{self.url}: {error}: check its name") from error
        except (OSError, StoreError):
            pass
        finally:
            links.bucket.set_timeouts(None)

    def objects(self) -> Iterator[ObjectInfo]:
        """All objects below the prefix in the order of their keys, with ETags; keys are whole."""
        with _translated(self.url):
            yield from self.links().objects.list(self._bucket.prefix)

    def __reduce__(self) -> tuple[Callable[[BucketTree], S3Tree], tuple[BucketTree]]:
        return S3Tree, (self._bucket,)

    def links(self) -> Links:
        """Those of this process. Raises: ConfigError."""
        links = self._links
        if links is not None and links.pid == os.getpid():
            return links
        with _MAKING.lock:
            links = self._links
            if links is None or links.pid != os.getpid():
                links = self._links = Links(self._bucket)
            return links

    def _key(self, path: str) -> str:
        clean = clean_path(path)
        if not clean:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.url)
        return self._bucket.prefix + clean

    # --- reading ---------------------------------------------------------------------------------

    def open_read(self, path: str) -> io.BufferedIOBase:
        """See `Tree`."""
        raw = _S3File(self, path, self.stat(path).size)
        return io.BufferedReader(raw, BUFFER_BYTES)

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Tree`."""
        with _translated(path):
            return self.links().objects.get(self._key(path), begin, end)

    def read_ranges(self, items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """See `Tree`."""
        return self._readers.read_all(plan(items, max_gap), self._read_span, len(items))

    def _read_span(self, span: MergedRead) -> list[tuple[int, memoryview]]:
        if span.end == span.begin:
            return cut(span, memoryview(b""))
        if span.end == WHOLE or span.end - span.begin <= READ_BYTES:
            end = None if span.end == WHOLE else span.end
            return cut(span, memoryview(self.read(span.path, span.begin, end)))
        begins = range(span.begin, span.end, READ_BYTES)
        ranges = [(begin, min(begin + READ_BYTES, span.end)) for begin in begins]
        with _translated(span.path):
            pieces = self.links().objects.get_ranges(self._key(span.path), ranges)
        return cut(span, memoryview(b"".join(pieces)))

    # --- writing ---------------------------------------------------------------------------------

    def writer(self, path: str, *, size: int | None = None) -> Writer:
        """See `Tree`."""
        links = self.links()
        return S3Writer(links.boto(), links.objects, self._bucket.name, self._key(path), size)

    def write_atomic(self, path: str, chunks: Iterable[Buffer]) -> None:
        """See `Tree`."""
        write_all(self.writer(path), chunks)

    def remove(self, path: str) -> None:
        """See `Tree`."""
        self.stat(path)  # S3 does not say whether there was anything
        with _translated(path):
            self.links().objects.delete(self._key(path))

    def remove_tree(self, path: str) -> int:
        """See `Tree`."""
        clean = clean_path(path)
        count, batch = 0, list[str]()
        for info in self.list(f"{clean}/" if clean else ""):
            batch.append(info.path)
            count += 1
            if len(batch) == DELETES:
                self.remove_files(batch)
                batch.clear()
        self.remove_files(batch)
        return count

    def remove_files(self, paths: Sequence[str]) -> None:
        """See `FlatTree`."""
        with _translated(self.url):
            if paths:
                self.links().objects.delete(*(self._bucket.prefix + path for path in paths))

    def copy(self, path: str, new_path: str) -> None:
        """See `Tree`. Objects of more than 5 GiB are copied in parts, by the store."""
        source = {"Bucket": self._bucket.name, "Key": self._key(path)}
        self.stat(path)
        with _translated(path):
            self.links().boto().copy(source, self._bucket.name, self._key(new_path))

    def rename(self, path: str, new_path: str) -> None:
        """See `Tree`."""
        self.copy(path, new_path)
        with _translated(path):
            self.links().objects.delete(self._key(path))

    def makedirs(self, path: str) -> None:
        """See `Tree`."""
        clean_path(path)

    # --- names -----------------------------------------------------------------------------------

    def list(self, prefix: str = "", after: str = "") -> Iterator[Info]:
        """See `Tree`."""
        top = self._bucket.prefix
        with _translated(self.url):
            objects = self.links().objects
            for info in objects.list(top + prefix.lstrip("/"), top + after if after else ""):
                if not info.key.endswith("/"):  # what consoles make for a directory
                    yield Info(info.key[len(top) :], info.size, info.mtime_ns)

    def list_dir(self, path: str = "") -> Iterator[Entry]:
        """See `Tree`."""
        top = self._top(path)
        with _translated(path or self.url):
            for page in self._pages(top, "/"):
                found = [Entry(folder[len(top) : -1], True) for folder in page.folders]
                found += [
                    Entry(info.key[len(top) :], False, info.size)
                    for info in page.infos
                    if info.key != top
                ]
                yield from sorted(found, key=lambda entry: os.fsencode(entry.name))

    def first_files(self, path: str) -> FirstFiles:
        """See `FlatTree`."""
        top, cut = self._top(path), len(self._bucket.prefix)
        with _translated(path or self.url):
            page = next(self._pages(top))
        keys = [info.key[len(top) :] for info in page.infos if info.key != top]
        infos = [
            Info(info.key[cut:], info.size, info.mtime_ns)
            for info in page.infos
            if not info.key.endswith("/")
        ]
        last = page.infos[-1].key[cut:] if page.next_token and page.infos else ""
        return FirstFiles(infos, keys, last)

    def _top(self, path: str) -> str:
        """What the keys below a directory begin with."""
        clean = clean_path(path)
        return self._bucket.prefix + (f"{clean}/" if clean else "")

    def _pages(self, top: str, delimiter: str = "") -> Iterator[ListingPage]:
        """A listing, request by request; each is repeated where the store fails."""
        links, token = self.links(), ""
        while True:
            ask = partial(links.bucket.list_page, top, "", token, delimiter)
            page = links.stack.retrying.repeat(ask)
            yield page
            if not page.next_token:
                return
            token = page.next_token

    def stat(self, path: str) -> Info:
        """See `Tree`."""
        with _translated(path):
            found = self.links().objects.head(self._key(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return Info(clean_path(path), found.size, found.mtime_ns)

    def exists(self, path: str) -> bool:
        """See `Tree`."""
        clean = clean_path(path)
        if not clean:
            return True
        with _translated(path):
            objects = self.links().objects
            key = self._bucket.prefix + clean
            return objects.head(key) is not None or next(objects.list(f"{key}/"), None) is not None

    def close(self) -> None:
        """See `Tree`."""
        links, self._links = self._links, None
        if links is not None and links.pid == os.getpid():
            links.close()


class _S3File(SeekableReader):
    """An object that is read by ranges."""

    def __init__(self, tree: S3Tree, path: str, size: int) -> None:
        super().__init__(size)
        self._tree = tree
        self._path = path

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer`, by several requests at a time where it is large."""
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        if end <= self._at:
            return 0
        begins = range(self._at, end, READ_BYTES)
        items = [(self._path, begin, min(begin + READ_BYTES, end)) for begin in begins]
        done = 0
        for piece in self._tree.read_ranges(items, max_gap=-1):
            view[done : done + len(piece)] = piece
            done += len(piece)
        self._at += done
        return done

    def readall(self) -> bytes:
        """The rest. `io` would ask for 8 KiB at a time, each a request."""
        rest = bytearray(max(0, self._size - self._at))
        return bytes(memoryview(rest)[: self.readinto(rest)])


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Store errors as `OSError`."""
    try:
        yield
    except ObjectMissing as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    except KeysRefused as error:
        raise PermissionError(errno.EACCES, str(error), path) from error
    except (NoPlace, Throttled) as error:
        text = f"the store was too busy for as long as requests are repeated: {error}"
        raise OSError(errno.EIO, text, path) from error
    except Refused as error:
        raise OSError(errno.EINVAL, str(error), path) from error
    except StoreError as error:
        raise OSError(errno.EIO, str(error), path) from error
    except Exception as error:
        raise _of_boto(error, path) from error


def _of_boto(error: Exception, path: str) -> Exception:
    """boto3's error by its code; any other as it is."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return error
    from fsdata.objects.s3.errors import KEY_CODES

    code = str(response.get("Error", {}).get("Code", ""))
    if code in ("404", "NoSuchKey", "NoSuchBucket"):
        return FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)} ({code})", path)
    if code in ("403", *KEY_CODES):
        return PermissionError(errno.EACCES, f"the keys may not do that ({code})", path)
    return OSError(errno.EIO, f"the store answers {code}", path)


_CONFORMS: Callable[[BucketTree], FlatTree] = S3Tree
