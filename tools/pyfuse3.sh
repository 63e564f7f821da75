#!/usr/bin/env bash
# Build the extra pyfuse3, with the Debian packages that it needs: tools/pyfuse3.sh PYTHON
#
# Called by the Makefile. Where it can't be built, say so and go on: tests that need it are skipped.
set -uo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
python="$1"

"$python" -c 'import pyfuse3' 2>/dev/null && exit 0
headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
"$here/apt.sh" libfuse3-dev:/usr/include/fuse3/fuse_lowlevel.h pkg-config:pkg-config gcc:gcc \
  libc6-dev:/usr/include/stdio.h "python3-dev:$headers/Python.h" &&
  "$python" -m pip install -q --disable-pip-version-check \
    --config-settings editable_mode=compat -e "$here/..[pyfuse3]" && exit 0
echo "pyfuse3 can't be built here: tests of --transport pyfuse3 are skipped" >&2
