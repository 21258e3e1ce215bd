#!/usr/bin/env bash
# Checks and measures the Triton and the CUDA backend on the GPU of this machine, from a plain source tree, without network.
#
#   bench/gpu.sh OUTDIR [PART ...]
#
# A first run is three calls, the most telling first; on the same machine or each on another:
#   plan-1     build smoke first
#   plan-2     build ncu-cuda sanitize-cuda tests-cuda ncu sanitize accuracy
#   plan-3     build short stages large sweep others hidden tests
#
# plan-1 takes at most eight minutes, the others nine.  A part of a plan may take half of what is left of that, the last all of it.
#
# Parts, in this order if none is named:
#   build      the compiled modules next to the sources, by the machine's own compiler and nvcc: the CPU's, and the CUDA
#              kernels for this GPU (the Triton kernels are compiled at first use)
#   smoke      one tile of wgmma and of mma with ldmatrix against float64, then each stage and preset of both backends once
#              against the CPU backend; a process for each, 30 seconds after its imports and without compiling; up to four
#              at a time (one on a GPU that admits one process: taskset -c 0 bench/gpu.sh ...)
#   first      clustering, the whole chain and Config.gae() at 16 × 400, one decision at 400 and 2,048 records; likewise
#   accuracy   cosines out of the CUDA kernels' Gram matrices against float64, at 16 × 400 × 3,584
#   tests      every test marked gpu (tests.log)
#   tests-cuda the tests of stages and chain again, with the CUDA kernels
#   ceilings   copy bandwidth, matrix product, an empty graph
#   short      from here to `others` with rows of both backends: 16 groups × 400 records, the whole chain, and competitors
#   sweep      32 thresholds at once
#   stages     each stage separately
#   large      64 × 2,048 records
#   long       one group of 32,768
#   others     presets without fingerprints, ε = 0, Config.gae() over the batch and over prompt groups
#   hidden     taps and early exit at Qwen2.5-7B's shape with random weights
#   sanitize   compute-sanitizer over a small run of the Triton kernels (sanitize.log); sanitize-cuda: of the CUDA kernels
#   ncu        Nsight Compute over one whole chain with Triton (ncu.log); ncu-cuda: with the CUDA kernels
#
# Writes gpu.json and gpu.md (with a header of the machine) into OUTDIR after every figure.  Each part is a separate
# process and ends within nine minutes; parts without time left are named.  The last lines say which targets were met.  `python -m bench gpu --merge A B --out C` merges the folders of several calls.
#
#   PYTHON=python3   the interpreter that has torch and Triton
#   WHEELS=DIR       wheels of missing packages, installed without network and only for this run
#   COMMIT=ID        of the sources, if this is not a checkout
#   DRY=1            without a GPU, tiny sizes by interpreter and emulator: measures nothing
#   LIMIT=30         seconds of each check of smoke and first
set -euo pipefail

if [ $# -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
  sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "$0"
  exit $(( $# < 1 ? 2 : 0 ))
fi

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
parts=("$@")
limit=0  # seconds of all parts together; none
case ${parts[*]:-} in
  plan-1) parts=(build smoke first) limit=480 ;;
  plan-2) parts=(build ncu-cuda sanitize-cuda tests-cuda ncu sanitize accuracy) limit=525 ;;
  plan-3) parts=(build short stages large sweep others hidden tests) limit=525 ;;
esac
[ ${#parts[@]} -gt 0 ] || parts=(build smoke first accuracy tests tests-cuda ceilings short sweep stages large long
  others hidden sanitize sanitize-cuda ncu ncu-cuda)

cd "$root"
python=${PYTHON:-python3}
python=$(command -v "$python")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
path=$root
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" "$WHEELS"/*.whl
  path=$scratch/site:$path
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# cmake and ninja of the interpreter's own environment, where they are not on the PATH.
bin=$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')
export PATH=$PATH:$bin
options=(--out "$out")
[ -z "${COMMIT:-}" ] || options+=(--commit "$COMMIT")
[ -z "${DRY:-}" ] || options+=(--dry)
[ -z "${LIMIT:-}" ] || options+=(--limit "$LIMIT")

build() {
  # Without nvcc only the CPU module; with it also the kernels for the GPUs here, and one that does not compile is an error.
  # Nothing is downloaded, with a network or without.
  local lacking
  lacking=$("$python" -c 'import importlib.util as u; print(*(n for n in ("pybind11", "setuptools") if not u.find_spec(n)))')
  command -v cmake >/dev/null || lacking="cmake $lacking"
  "${CXX:-c++}" --version >/dev/null 2>&1 || g++ --version >/dev/null 2>&1 || lacking="a C++ compiler (g++) $lacking"
  if [ -n "${lacking% }" ]; then
    echo "not built, and nothing is downloaded: this machine lacks ${lacking% }"
    return 1
  fi
  local nvcc=${CUDACXX:-nvcc} cuda=auto
  command -v "$nvcc" >/dev/null || nvcc=/usr/local/cuda/bin/nvcc
  if command -v "$nvcc" >/dev/null; then
    cuda=1
    [ -n "${BIPACE_CUDA_ARCHS:-}" ] || BIPACE_CUDA_ARCHS=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u)
    export BIPACE_CUDA_ARCHS
  fi
  if ! BIPACE_CUDA=$cuda timeout -k 10 "$1" "$python" setup.py -q build_ext --inplace >"$out/build.log" 2>&1; then
    tail -n 5 "$out/build.log"
    return 1
  fi
  grep '^bipace_kernels: ' "$out/build.log"
  "$python" -c 'import bipace_kernels as bk; print(*bk.backends().values(), sep="\n")'
}

ncu() {
  # Time, memory, clock, tensor cores and stalls of every kernel, kernel by kernel, at the GPU's own clocks.
  local tool
  tool=$(PATH=$PATH:/usr/local/cuda/bin command -v ncu) || { echo "not available: ncu is not installed"; return 0; }
  [ -z "${DRY:-}" ] || { echo "not available: no GPU"; return 0; }
  timeout -k 10 "$2" "$tool" --clock-control none --profile-from-start off --csv --page details \
    --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats --section LaunchStats \
    "$python" -m bench.gpu_smoke --profile --backend "$1" >"$out/$part.log" 2>&1 || tail -n 3 "$out/$part.log"
}

failed=()
for i in "${!parts[@]}"; do
  part=${parts[i]} began=$SECONDS left=530
  if [ "$limit" != 0 ]; then
    left=$((limit - SECONDS))
    [ $((i + 1)) = ${#parts[@]} ] || [ "$left" -lt 60 ] || left=$((left / 2))  # so that no part starves those after it
  fi
  echo "== $part"
  if [ "$left" -lt 30 ]; then
    failed+=("$part (no time was left)")
  elif [ "$part" = build ]; then
    build $((left < 500 ? left : 500)) || failed+=("$part")
  elif [ "$part" = ncu ]; then
    ncu triton "$left"
  elif [ "$part" = ncu-cuda ]; then
    ncu cuda "$left"
  else
    # Inside, a part stops by itself before; here it is ended where it cannot.
    timeout -k 10 "$left" "$python" -m bench gpu "$part" --seconds $((left * 9 / 10)) "${options[@]}" || failed+=("$part")
  fi
  echo "== $part: $((SECONDS - began)) s"
done
for log in "$out"/*.log; do  # small enough to copy; the end has the error
  [ ! -f "$log" ] || { tail -c 100000 "$log" >"$scratch/log" && cp "$scratch/log" "$log"; }
done
"$python" -m bench gpu --targets --out "$out" || failed+=(targets)
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
