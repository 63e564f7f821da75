#!/usr/bin/env bash
# Print a Python that can run SliceFS: tools/python.sh [COMMAND]
#
# Called by the Makefile to create .venv. Where there is none and none was asked for, Debian's own
# is installed, whose venv is a package that a fresh system lacks. 3.11 comes first because Debian's
# python3-rados and the wheel of tikv-client exist for it alone. Names are tried by running them: a
# pyenv shim may exist without its version.
set -euo pipefail

suits='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'
given="${1:-}"

find() {
  local name
  for name in ${given:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if "$name" -c "$suits" 2>/dev/null; then
      "$name" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  return 1
}

find && exit 0
if [[ -z "$given" ]] && command -v apt-get >/dev/null; then
  "${BASH_SOURCE[0]%/*}/apt.sh" python3-venv:no-such-program >&2 || exit 1
  find && exit 0
fi
said="$("${given:-python3}" --version 2>&1 | head -1 || true)"
echo "SliceFS needs Python 3.11 or newer with venv; ${given:-python3} is: ${said##*: }." >&2
echo "Install one, and name it: make PYTHON=/path/to/python" >&2
exit 1
