#!/usr/bin/env bash
# The benchmarks on one GPU, in under 8 minutes, without network: random weights in the shapes of
# Qwen3-8B/0.6B and Llama-3-8B/1B. Without a GPU the same code runs at tiny sizes on the CPU.
#   benchmarks/gpu.sh             tables on stdout, JSON in data/bench (or in $OUT)
#   PYTHON=python3 benchmarks/gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
out="${OUT:-data/bench}"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if ! missing=$("$python" -c 'import hydra, numba, pyarrow, torch, transformers' 2>&1); then
  echo "error: PYTHON=$python: ${missing##*$'\n'}; run make setup, or name another PYTHON" >&2
  exit 2
fi

status=0
# Seconds that each may take: a compiled shape costs a minute or more, so that part may be cut.
for part in "eager 290" "compiled 160"; do
  set -- $part
  timeout "$2" "$python" -m benchmarks.gpu "$1" --out "$out"
  code=$?
  if [ "$code" -eq 124 ]; then
    echo "benchmarks.gpu $1: stopped after $2 s; what it had measured is above"
  elif [ "$code" -ne 0 ]; then
    status=$code
  fi
done
exit "$status"
