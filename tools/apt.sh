#!/usr/bin/env bash
# Install Debian packages that are missing: tools/apt.sh PACKAGE:PROOF…
#
# Called by the Makefile. PROOF is a command or an absolute path (a glob) that the package brings,
# so that what came in another way counts too, and apt is asked nothing when nothing is missing.
set -euo pipefail
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

missing=()
for item in "$@"; do
  package="${item%%:*}" proof="${item#*:}"
  if [[ "$proof" == /* ]]; then
    compgen -G "$proof" >/dev/null || missing+=("$package")
  else
    command -v "$proof" >/dev/null || missing+=("$package")
  fi
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "missing: ${missing[*]} (Debian names); there is no apt-get here, install them by hand" >&2
  exit 1
fi
as_root=()
if [[ "$(id -u)" != 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "missing packages; as root run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends \
    "${missing[@]}" </dev/null >/dev/null
}

echo "installing ${missing[*]}; it may take some minutes"
# Lists that are absent or old name versions the mirror no longer has: update, and once more.
install || { "${as_root[@]}" apt-get update -q </dev/null >/dev/null && install; } || {
  echo "could not install; as root run: apt-get install ${missing[*]}" >&2
  exit 1
}
