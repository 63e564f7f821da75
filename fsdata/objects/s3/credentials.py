"""The credentials and the address of an S3 store, as botocore finds them.

Keys come from, in this order: the file that the option `credentials` names, the environment
variables ACCESS_KEY, SECRET_KEY and SESSION_TOKEN, and the chain that all AWS programs share
(AWS_ACCESS_KEY_ID, ~/.aws, a credential process, web identity, the instance's role). Temporary keys
are renewed by botocore before they end. Keys that the store refuses are looked up anew, so that a
changed file or profile is taken over by running mounts.

boto3 is imported when it is needed: that takes longer than most commands do.
Threading: any thread; looking up is done by one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from fsdata.objects.s3.sigv4 import AccessKey
from fsmeta.errors import ConfigError, Unavailable
from fsmeta.runtime import Runtime

RENEW_PAUSE_S: Final = 1.0  # refused keys are looked up at most so often: it may run a program
_PROBE: Final = "probe"  # a key: only its place in the URL matters
_INSTALL: Final = "storage s3 needs boto3: pip install 'slicefs[s3]'"
_METHODS: Final = {  # by botocore's words
    "env": "AWS_ACCESS_KEY_ID in the environment",
    "shared-credentials-file": "the AWS credentials file",
    "config-file": "the AWS config file",
    "iam-role": "the role of this machine",
    "container-role": "the role of this container",
}


class S3Account(NamedTuple):
    """What decides keys, region and address."""

    endpoint: str = ""  # http(s)://host[:port]; empty: AWS
    region: str = ""  # empty: as the profile or the environment have it
    path_style: bool | None = None  # bucket in the path, or in the host name; None: as usual
    profile: str = ""
    credentials: str = ""  # a file like ~/.aws/credentials
    ca: str = ""  # certificate authorities in a PEM file


class Keys:
    """The access key to sign with. Raises: ConfigError where there is none."""

    def __init__(self, runtime: Runtime, account: S3Account) -> None:
        self._runtime = runtime
        self._account = account
        self._lock = runtime.lock()
        self._session = new_session(account)  # guarded by _lock, but for reading
        self._source = self._find()  # guarded by _lock, but for reading
        self._client: Any = None  # guarded by _lock
        self._looked_s = runtime.monotonic()  # guarded by _lock

    def _find(self) -> Any:
        """botocore's credentials. Raises: ConfigError, Unavailable."""
        given = _given(os.environ)
        if given is not None and not self._account.credentials:
            return given
        try:
            found = self._session.get_credentials()
        except _botocore_error() as error:
            raise Unavailable(f"no S3 credentials: {error}") from error
        if found is None:
            raise ConfigError(
                "there are no S3 credentials: set ACCESS_KEY and SECRET_KEY, "
                "name a file or a profile (--store-option credentials=FILE), or run `aws configure`"
            )
        return found

    def current(self) -> AccessKey:
        """The key now; a temporary one is renewed in time. Raises: Unavailable."""
        source = self._source
        if isinstance(source, AccessKey):
            return source
        try:
            frozen = source.get_frozen_credentials()
        except _botocore_error() as error:
            raise Unavailable(f"S3 credentials can't be renewed: {error}") from error
        return AccessKey(frozen.access_key, frozen.secret_key, frozen.token or "")

    def renew(self, refused: AccessKey) -> bool:
        """Whether there is another key than the one the store refused. Raises: Unavailable."""
        with self._lock:
            if self.current() != refused:
                return True
            now = self._runtime.monotonic()
            if now - self._looked_s < RENEW_PAUSE_S:
                return False
            self._looked_s = now
            try:
                self._session = new_session(self._account)
                self._drop_client()
                self._source = self._find()
            except ConfigError as error:
                raise Unavailable(str(error)) from error
        return self.current() != refused

    def shown(self) -> str:
        """Where the keys come from, in a few words without a secret."""
        if isinstance(self._source, AccessKey):
            return "ACCESS_KEY and SECRET_KEY in the environment"
        if self._account.profile:
            return f"profile {self._account.profile}"
        method = str(getattr(self._source, "method", ""))
        return _METHODS.get(method, method or "botocore")

    def close(self) -> None:
        """Close what boto3 has open, if anything."""
        with self._lock:
            self._drop_client()

    def _drop_client(self) -> None:
        """The caller holds the lock."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def client(self) -> Any:
        """boto3's client, for what is done rarely. Raises: ConfigError."""
        with self._lock:
            if self._client is None:
                self._client = new_client(self._session, self._account, self.current())
            return self._client


def _given(environment: Mapping[str, str]) -> AccessKey | None:
    access, secret = environment.get("ACCESS_KEY", ""), environment.get("SECRET_KEY", "")
    if not access or not secret:
        return None
    return AccessKey(access, secret, environment.get("SESSION_TOKEN", ""))


def _botocore_error() -> type[Exception]:
    from botocore.exceptions import BotoCoreError

    error: type[Exception] = BotoCoreError
    return error


def new_session(account: S3Account) -> Any:
    """A boto3 session that has read its files just now. Raises: ConfigError."""
    try:
        import boto3
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
    try:
        core = botocore.session.Session(profile=account.profile or None)
        if account.credentials:
            if not os.access(account.credentials, os.R_OK):
                raise ConfigError(
                    f"credentials {account.credentials}: the file does not exist, or this user may"
                    " not read it"
                )
            core.set_config_variable("credentials_file", account.credentials)
            only = ("shared-credentials-file",)
            resolver = core.get_component("credential_provider")
            resolver.providers[:] = [each for each in resolver.providers if each.METHOD in only]
        return boto3.Session(botocore_session=core, region_name=account.region or None)
    except BotoCoreError as error:
        raise ConfigError(f"S3 settings: {error}") from error


def region_of(session: Any) -> str:
    """The region to sign for; servers that are not AWS take this one."""
    return str(session.region_name or "us-east-1")


def new_client(session: Any, account: S3Account, key: AccessKey) -> Any:
    """boto3's own S3 client. Raises: ConfigError."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    style = account.path_style
    if style is None:
        style = bool(account.endpoint)  # only AWS is sure to have a host name for each bucket
    s3 = {"addressing_style": "path" if style else "virtual"}
    try:
        return session.client(
            "s3",
            endpoint_url=account.endpoint or None,
            region_name=region_of(session),
            aws_access_key_id=key.access,
            aws_secret_access_key=key.secret,
            aws_session_token=key.token or None,
            verify=account.ca or None,
            config=Config(
                s3=s3,
                signature_version="s3v4",
                connect_timeout=5,
                read_timeout=15,
                retries={"max_attempts": 1},
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"S3 settings: {error}") from error


def bucket_url(client: Any, bucket: str) -> str:
    """The URL below which the bucket's objects are, ending in `/`: botocore has the rules.

    Raises: ConfigError.
    """
    from botocore.exceptions import BotoCoreError

    try:
        url = client.generate_presigned_url(
            "get_object", Params={"Bucket": bucket, "Key": _PROBE}, ExpiresIn=60
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"bucket {bucket!r}: {error}") from error
    parts = urlsplit(url)
    assert parts.path.endswith(f"/{_PROBE}"), "botocore puts the key last"
    return f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix(_PROBE)}"
