#!/usr/bin/env bash
# The environment of the tests that need torch: made once, outside the repository, named by what is
# in it. Prints its Python. 4.7 GB, four minutes.
set -euo pipefail

torch=2.13.0
lightning=2.6.6
env="${SLICEFS_TORCH_ENV:-$HOME/.cache/slicefs/torch-$torch-lightning-$lightning}"
if ! "$env/bin/python" -c 'import torch, numpy, pytorch_lightning' 2>/dev/null; then
  echo "making $env: 0.5 GB to download, 4.7 GB on the disk, some minutes" >&2
  "${PYTHON:-.venv/bin/python}" -m venv "$env"
  "$env/bin/pip" install -q --disable-pip-version-check \
    "torch==$torch" numpy "pytorch-lightning==$lightning" safetensors >&2
fi
"$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
