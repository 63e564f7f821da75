#!/bin/sh
# Makes the environment for `make test-data`, outside the repository, and prints its Python.
#
# pandas, pyarrow, zarr and Hugging Face `datasets`: 0.6 GB. It is made once for all trees; a
# lock keeps two from making it at the same time.
set -eu
pandas=2.3.3 pyarrow=22.0.0 zarr=3.1.3 datasets=4.4.1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/slicefs
place=$cache/data-pandas-$pandas-zarr-$zarr-datasets-$datasets
mkdir -p "$cache"
exec 9>"$cache/data.lock"
flock 9
if [ ! -x "$place/bin/python" ]; then
	echo "pandas, zarr and datasets are installed into $place: 0.6 GB" >&2
	rm -rf "$place.part"
	"${1:-python3}" -m venv "$place.part" >&2
	"$place.part/bin/python" -m pip install -q --disable-pip-version-check \
		"pandas==$pandas" "pyarrow==$pyarrow" "zarr==$zarr" "datasets==$datasets" \
		pytest pytest-timeout boto3 click crc32c hiredis hypothesis lz4 msgpack redis zstandard >&2
	mv "$place.part" "$place"
fi
echo "$place/bin/python"
