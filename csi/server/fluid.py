"""`slicefs-csi-fluid [CONFIG]`: the program of a Fluid ThinRuntime's FUSE pod.

Fluid writes a JSON file: what to mount, where, and options, of which those that are secret are
names of files. This program becomes `slicefs mount`, and passes secrets in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from csi.clients.backend import META, META_VARIABLE
from csi.clients.mounting import for_pods, mount_words
from csi.errors import CsiError
from csi.host.commands import find_slicefs
from csi.names import clean_path

_CONFIG: Final = "/etc/fluid/config/config.json"
_SCHEME: Final = "slicefs://"
_VARIABLES: Final = {
    "metaurl": META_VARIABLE,
    "access-key": "ACCESS_KEY",
    "secret-key": "SECRET_KEY",
}
_READ_ONLY: Final = "ReadOnlyMany"


class FluidMount(NamedTuple):
    """What to mount, and where."""

    target: str
    words: tuple[str, ...]
    environment: Mapping[str, str]


def main() -> None:
    """The `slicefs-csi-fluid` program."""
    if len(sys.argv) > 2:
        sys.exit(f"usage: slicefs-csi-fluid [{_CONFIG}], in the FUSE pod of a ThinRuntime")
    path = sys.argv[1] if len(sys.argv) == 2 else _CONFIG
    try:
        with open(path, encoding="utf-8") as file:
            found = parse_config(json.load(file))
        os.makedirs(found.target, exist_ok=True)
        words = [find_slicefs(), "mount", *found.words, META, found.target]
        os.execvpe(words[0], words, {**os.environ, **found.environment})
    except CsiError as error:
        sys.exit(f"slicefs-csi-fluid: {error.text}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"slicefs-csi-fluid: {path} is no configuration of a ThinRuntime: {error!r}")


def parse_config(config: Mapping[str, Any]) -> FluidMount:
    """Raises: CsiError, OSError, KeyError, ValueError."""
    mounts = config["mounts"]
    if len(mounts) != 1:
        raise ValueError(f"a data set has one mount, not {len(mounts)}")
    [mount] = mounts
    place = str(mount["mountPoint"])
    if not place.startswith(f"{_SCHEME}/"):
        raise ValueError(f"mountPoint {place[:80]!r}: write {_SCHEME}/DIRECTORY")
    options = {**(config.get("runtimeOptions") or {}), **(mount.get("options") or {})}
    environment = {
        variable: _value(options.pop(key)) for key, variable in _VARIABLES.items() if key in options
    }
    if META_VARIABLE not in environment:
        raise ValueError("there is no metaurl: name it in encryptOptions of the data set")
    modes = config.get("accessModes") or [_READ_ONLY]
    readonly = bool(mount.get("readOnly")) or all(mode == _READ_ONLY for mode in modes)
    given = [
        name if value in ("", "true") else f"{name}={value}" for name, value in options.items()
    ]
    subdir = clean_path("mountPoint", place.removeprefix(_SCHEME))
    words = for_pods(mount_words(given, readonly, subdir))
    return FluidMount(str(config["targetPath"]), words, environment)


def _value(text: str) -> str:
    """What an option says; for one that is secret, Fluid names the file that has it."""
    if not (text.startswith("/") and os.path.isfile(text)):
        return text
    with open(text, encoding="utf-8") as file:
        return file.read().strip()


if __name__ == "__main__":
    main()
