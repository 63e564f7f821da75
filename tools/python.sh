#!/usr/bin/env bash
# Print a Python that can run SliceFS, or say what to install: tools/python.sh [COMMAND]
#
# Called by the Makefile to create .venv. 3.11 comes first because Debian's python3-rados and the
# wheel of tikv-client exist for it alone. Names are tried by running them: a pyenv shim may exist
# without its version.
set -euo pipefail

suits='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'
for name in ${1:-python3.11 python3.12 python3.13 python3.14 python3}; do
  if "$name" -c "$suits" 2>/dev/null; then
    "$name" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
echo "SliceFS needs Python 3.11 or newer with venv; found: $(python3 --version 2>&1 || true)." >&2
echo "Debian and Ubuntu: apt-get install python3 python3-venv. Or: make PYTHON=/path/to/python" >&2
exit 1
