#!/usr/bin/env bash
# Install flash-attn in .venv-gpu, if it is not installed. It is not in requirements-gpu.txt: the registry has only its
# source. verl's developers publish a wheel for these versions (verl-wheelhouse, named in verl's pyproject.toml).
#
#   bash extras/preflight/flash_attn.sh UV VENV ["build" | FILE.whl]
#
# "build" compiles it for this node's GPUs, which takes about an hour of all cores. Without flash-attn, most recipes still
# train (extras/preflight/attention.py). The wheel's address has not been tried: no test machine could reach it.

set -u
uv=$1 venv=$2 choice=${3:-}
python=$venv/bin/python
version=2.8.3
wheel=https://github.com/verl-project/verl-wheelhouse/releases/download/flash-attention-v$version
wheel=$wheel/flash_attn-$version-cp312-cp312-linux_x86_64.whl  # CUDA 13.0, torch 2.11
install=("$uv" pip install --quiet --python "$python" --no-deps)

build() {
  local nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc jobs capabilities
  if ! "$nvcc" --version 2>/dev/null | grep -q 'release 13\.'; then
    echo "missing: $nvcc of CUDA 13, which compiles flash-attn. Install the CUDA 13.0 toolkit, and set CUDA_HOME to it."
    exit 1
  fi
  capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d . | sort -u | paste -sd ';')
  jobs=$(($(nproc) / 4))  # each takes about 8 GB of memory and four threads
  echo "== flash-attn $version: compiling for compute capability $capabilities; about an hour"
  "$uv" pip install --quiet --python "$python" wheel ninja psutil || exit 1
  CUDA_HOME=$(dirname "$(dirname "$nvcc")") FLASH_ATTN_CUDA_ARCHS=$capabilities MAX_JOBS=$((jobs > 0 ? jobs : 1)) \
    FLASH_ATTENTION_FORCE_BUILD=TRUE "${install[@]}" --no-build-isolation "flash-attn==$version" || exit 1
}

if "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("flash_attn"))'; then
  exit 0
elif [ "$choice" = build ]; then
  build
elif [ -n "$choice" ]; then
  "${install[@]}" "$choice" || exit 1
elif ! UV_HTTP_TIMEOUT=60 UV_HTTP_RETRIES=1 "${install[@]}" "$wheel" 2>/dev/null; then
  echo "flash-attn is not installed: ${wheel##*/} could not be downloaded. Run: make math FLASH_ATTN=that-file.whl" \
    "(or FLASH_ATTN=build, one hour). Until then torch computes its part, and recipes that need it are refused."
  exit 0
fi
