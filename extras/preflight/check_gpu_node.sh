#!/usr/bin/env bash
# Check that a GPU node has what `make math` needs, before anything is downloaded. Each lack is one line with its fix.
#
#   bash extras/preflight/check_gpu_node.sh     exit status 1 if something is missing
#
# It needs only bash, awk, coreutils and nvidia-smi. Variables:
#   GPU_GIB   memory that each GPU must have (default: as much as configs/math.yaml needs with the recipe for the smallest
#             GPUs, configs/machines/gpu_16gb.yaml)
#   FORCE=1   print what is missing, but exit with status 0. For example for a driver below MIN_DRIVER with CUDA's
#             forward compatibility package

set -u
MIN_DRIVER=580 # of CUDA 13, for which the packages in requirements-gpu.txt are built
# In GiB: .venv-gpu 9, .venv-gym 1, the model 1, its export 2, rollouts 6 (435 steps of 2,048 episodes with about 340
# tokens), checkpoints 17. These are three of 5.5 each (weights and two moments in float32): the two that
# trainer.max_actor_ckpt_to_keep keeps, and the one that is being written. The rest is for logs and vLLM's caches.
MIN_DISK_GIB=40
MIN_CAPABILITY=8.0  # for bfloat16
MIN_SHM_GIB=1  # NCCL, and PyTorch between processes
GPU_GIB=${GPU_GIB:-15}
missing=0

report() {
  echo "missing: $*"
  missing=1
}

# A value of each GPU that CUDA_VISIBLE_DEVICES leaves visible. nvidia-smi does not read that variable.
query_gpus() {
  nvidia-smi ${CUDA_VISIBLE_DEVICES:+--id="$CUDA_VISIBLE_DEVICES"} --query-gpu="$1" --format=csv,noheader,nounits
}

free_gib() { df --output=avail -B1 "$1" | awk 'NR == 2 {printf "%d", $1 / 2^30}'; }

is_below() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }

if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  echo "nvidia-smi -L lists no GPU. On a CPU, run: make demo"
  exit 1
fi

if ! query_gpus name >/dev/null; then
  echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES lists a GPU that is not in nvidia-smi -L. Run: unset CUDA_VISIBLE_DEVICES"
  exit 1
fi

driver=$(query_gpus driver_version | head -n 1)
if is_below "$driver" "$MIN_DRIVER"; then
  report "NVIDIA driver $driver is too old for CUDA 13. Install driver $MIN_DRIVER or newer, and restart the node. Or" \
    "install CUDA's forward compatibility package, and set FORCE=1."
fi

memory=$(query_gpus memory.total | grep -E '^[0-9]+$' | sort -n | head -n 1)
if [ $((${memory:-0} / 1024)) -lt "$GPU_GIB" ]; then
  report "a GPU has $((${memory:-0} / 1024)) GiB, and Qwen2.5-0.5B needs $GPU_GIB (docs/hardware.md). Train a smaller model." \
    "Run: make math GPU_GIB=7 MODEL=HuggingFaceTB/SmolLM2-135M-Instruct"
fi

capability=$(query_gpus compute_cap | sort -V | head -n 1)
if is_below "$capability" "$MIN_CAPABILITY"; then
  report "a GPU has compute capability $capability, and bfloat16 needs $MIN_CAPABILITY. Use a newer GPU, or the CPU: make demo"
fi

if ! echo 'int main() { return 0; }' | "${CC:-cc}" -x c -o /dev/null - 2>/dev/null; then
  report "no C compiler that works: Triton and vLLM compile at their start. Run: apt-get install gcc libc6-dev"
fi

if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  report "no python3 with venv, which installs uv. Run: apt-get install python3-venv"
fi

disk=$(free_gib .)
if [ ! -e .venv-gpu/ready ] && [ "$disk" -lt "$MIN_DISK_GIB" ]; then
  report "$disk GiB are free in $PWD, of $MIN_DISK_GIB. Free some, or clone to another disk."
fi

shared=$(free_gib /dev/shm)
if [ "$shared" -lt "$MIN_SHM_GIB" ]; then
  report "$shared GiB are free in /dev/shm, of $MIN_SHM_GIB. Start the container with --shm-size=32g."
fi

[ "${FORCE:-0}" = 1 ] || exit $missing
