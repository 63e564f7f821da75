#!/bin/sh
# Makes the environment for `make test-torch`, outside the repository, and prints its Python.
#
# torch brings its CUDA libraries: 4.9 GB, some minutes. It is made once for all working trees; a
# lock keeps two from making it at the same time.
set -eu
torch=2.13.0 lightning=2.6.6
cache=${XDG_CACHE_HOME:-$HOME/.cache}/slicefs
place=$cache/torch-$torch-lightning-$lightning
mkdir -p "$cache"
exec 9>"$cache/torch.lock"
flock 9
if [ ! -x "$place/bin/python" ]; then
	echo "torch $torch is installed into $place: 4.9 GB, some minutes" >&2
	rm -rf "$place.part"
	"${1:-python3}" -m venv "$place.part" >&2
	"$place.part/bin/python" -m pip install -q --disable-pip-version-check \
		"torch==$torch" numpy "pytorch-lightning==$lightning" pytest pytest-timeout \
		boto3 click crc32c fsspec hiredis hypothesis lz4 msgpack redis zstandard >&2
	mv "$place.part" "$place"
fi
echo "$place/bin/python"
