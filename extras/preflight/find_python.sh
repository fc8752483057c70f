#!/usr/bin/env bash
# Print the interpreter for .venv-gpu: the system's Python 3.12 if it has its headers, or the one that uv installs.
# Triton compiles against the headers at run time, and flash-attn's wheel is for Python 3.12.
#
#   bash extras/preflight/find_python.sh UV

set -u
headers='import os, sys, sysconfig; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))'
if python3.12 -c "$headers" 2>/dev/null; then
  command -v python3.12
elif "$1" python install --quiet 3.12 2>/dev/null; then
  "$1" python find --managed-python 3.12
else
  echo "missing: Python 3.12 with headers, and uv cannot download it. Put one first in PATH" \
    "(on Ubuntu 24.04: apt-get install python3.12-dev)." >&2
  exit 1
fi
