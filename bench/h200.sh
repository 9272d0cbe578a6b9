#!/usr/bin/env bash
# One H200, no network: correctness, then timings, in under eight minutes.
#
#   bash bench/h200.sh [FOLDER]        results and logs go to FOLDER (build/h200)
#
# Needs jax 0.11.2 with its CUDA plugin, flax, optax, orbax-checkpoint, rich, pytest, torch 2.11 and
# transformers; nothing is installed. Every step has its own limit and writes its JSON as it goes, so
# that a step cut short leaves what it had. Exit status 1 when a check or a step failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/h200}")
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR="$out/cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
failed=()

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: done in $((SECONDS - start)) s"
  else
    echo "$name: exit status $? after $((SECONDS - start)) s"
    tail -n 15 "$out/$name.log"
    failed+=("$name")
  fi
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
"$python" - <<'PYTHON' || exit 2
import sys
import jax
print("python", sys.version.split()[0], "jax", jax.__version__, jax.devices())
if jax.default_backend() != "gpu":
    sys.exit("jax sees no GPU")
PYTHON

tests=("$python" -m pytest -q -p no:cacheprovider -W ignore)
step attention 70 "${tests[@]}" tests/test_tree_attention.py
step goldens 70 "${tests[@]}" tests/test_sglang_traces.py -k "whole_generations or plain_decoding"
step kernel 60 "$python" bench/kernel.py --batch 1 --rows 1 8 32 --context 2048 32768 \
  --repeats 5 --out "$out/kernel.json"
step round 90 "$python" bench/round.py --tree 3/4/8 --context 2048 32768 --out "$out/round.json"
step generate 80 "$python" bench/generate.py --batch 1 --tree 5/8/32 --context 2048 32768 \
  --out "$out/generate.json"
step torch 60 "$python" bench/compare_torch.py --batch 1 --rows 1 8 --context 2048 32768 \
  --out "$out/torch.json"

drawn=()
for name in kernel round generate torch; do
  [ -f "$out/$name.json" ] && drawn+=("$out/$name.json")
done
[ ${#drawn[@]} -gt 0 ] && timeout 20 "$python" bench/plot.py "${drawn[@]}" --out "$out/plots"

echo "total $SECONDS s; results in $out"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
