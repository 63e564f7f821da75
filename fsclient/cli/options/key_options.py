"""Options by which commands are given the key of an encrypted volume, and where secrets come from.

RSA keys are named by path, passphrases come from the environment or the terminal: arguments are
seen in `ps`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from getpass import getpass
from typing import Any, Final, TypeVar

import click

from fsclient.cli.options.options import complete_files
from fsclient.volume.volume_key import KeyOffer, env_bytes, read_rsa_key, require_package
from fsmeta.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])
PASSPHRASE: Final = "SLICEFS_PASSPHRASE"
RSA_PASSPHRASES: Final = ("SLICEFS_RSA_PASSPHRASE", "JFS_RSA_PASSPHRASE")
RSA_KEY: Final = "SLICEFS_RSA_KEY"
NEW_PASSPHRASE: Final = "SLICEFS_NEW_PASSPHRASE"
NEW_RSA_PASSPHRASE: Final = "SLICEFS_NEW_RSA_PASSPHRASE"


def key_options(command: _Command) -> _Command:
    """`--encrypt-rsa-key` and `--encrypt-passphrase`, for `offered`."""
    command = click.option(
        "--encrypt-passphrase",
        is_flag=True,
        help=f"Ask for the passphrase of an encrypted volume; else it is in {PASSPHRASE}.",
    )(command)
    return click.option(
        "--encrypt-rsa-key",
        metavar="PATH",
        shell_complete=complete_files,
        default=None,
        help="RSA key (PEM) of an encrypted volume; its own passphrase is in "
        f"{RSA_PASSPHRASES[0]} or asked for. {RSA_KEY} names it, too.",
    )(command)


def offered(rsa_path: str | None, ask: bool) -> KeyOffer:
    """What opens a volume that is there. Raises: ConfigError."""
    path = rsa_path or os.environ.get(RSA_KEY)
    passphrase = _asked("Passphrase: ", "--encrypt-passphrase") if ask else env_bytes(PASSPHRASE)
    insists = ask or bool(rsa_path)
    if not path:
        return KeyOffer(None, passphrase, insists)
    return _rsa_offer(path, RSA_PASSPHRASES, passphrase, insists)


def offered_for_new(rsa_path: str | None, ask: bool) -> KeyOffer | None:
    """What a new volume is to be encrypted for; None where it is not. Raises: ConfigError."""
    if rsa_path and ask:
        raise ConfigError("--encrypt-rsa-key and --encrypt-passphrase: choose one")
    if rsa_path:
        return _rsa_offer(rsa_path, RSA_PASSPHRASES)
    return _new_passphrase(PASSPHRASE, "--encrypt-passphrase") if ask else None


def offered_for_change(rsa_path: str | None, ask: bool) -> KeyOffer:
    """What a volume's key is to be wrapped for from now on. Raises: ConfigError."""
    if bool(rsa_path) == ask:
        raise ConfigError(
            "name the key that opens the volume: --to-rsa-key PATH or --to-passphrase"
        )
    if rsa_path:
        return _rsa_offer(rsa_path, (NEW_RSA_PASSPHRASE,))
    return _new_passphrase(NEW_PASSPHRASE, "--to-passphrase")


def _new_passphrase(variable: str, option: str) -> KeyOffer:
    """From the environment, else asked for twice."""
    require_package()
    passphrase = env_bytes(variable)
    if passphrase is None:
        passphrase = _asked("New passphrase: ", option, variable)
        if _asked("Once more: ", option, variable) != passphrase:
            raise ConfigError("the two passphrases differ: nothing was changed")
    return KeyOffer(None, passphrase)


def _rsa_offer(
    path: str, variables: tuple[str, ...], passphrase: bytes | None = None, insists: bool = False
) -> KeyOffer:
    key = read_rsa_key(path, env_bytes(*variables))
    if key.needs_passphrase() and sys.stdin is not None and sys.stdin.isatty():
        key = read_rsa_key(path, _asked(f"Passphrase of {path}: ", variables[0]))
    return KeyOffer(key, passphrase, insists)


def _asked(prompt: str, option: str, variable: str = PASSPHRASE) -> bytes:
    """What is typed at the terminal. Raises: ConfigError."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(f"{option}: there is no terminal to ask at: set {variable}")
    typed = getpass(prompt)
    if not typed:
        raise ConfigError("an empty passphrase opens nothing")
    return os.fsencode(typed)
