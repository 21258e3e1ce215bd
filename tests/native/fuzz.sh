#!/usr/bin/env bash
# Fuzzes tag matching and the JSONL reader for SECONDS each (default 20), and the torch ops by 20,000 calls; another SEED
# gives other inputs.
#   tests/native/fuzz.sh [SECONDS] [SEED]
set -euo pipefail
source "$(dirname "$0")/build.sh"

seconds=${1:-20}
seed=${2:-1}
build_checked fuzz_action_tag
(cd "$build" && ./fuzz_action_tag "$seconds" "$seed")
if [ -e "$root/bipace_kernels/cli/rollouts.py" ]; then
  PYTHONPATH="$root" "$python" "$root/tests/native/fuzz_jsonl.py" "$seconds" "$seed"
fi
PYTHONPATH="$root" "$python" "$root/tests/native/fuzz_ops.py" 20000 "$seed"
