#!/usr/bin/env bash
# Runs the tests of native code under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/native/sanitize.sh [PYTEST ARGUMENTS]      e.g. -k ragged tests/clusters/test_clusters.py
#   PYTHON     interpreter whose extension module is built           (default python3)
#   BUILD      build folder                                          (default build/sanitize)
#   MAX_JOBS   compiler processes                                    (default all cores)
# The sanitized module lives in a copy of the package inside the build folder; the one in use stays as it is.
# Without arguments the torch ops are fuzzed and the CUDA kernels run too: by their emulator, compiled as C++ with the
# same sanitizers.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${PYTHON:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") # absolute, and still the link that marks a venv
build=${BUILD:-$root/build/sanitize}
# Python itself and torch keep memory until the end, which the leak checker would report.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:abort_on_error=1

cmake=cmake
"$python" -c 'import cmake.__main__' 2>/dev/null && cmake="$python -m cmake"
mkdir -p "$build"
{
  $cmake -S "$root" -B "$build" -DBIPACE_SANITIZE=address,undefined \
    -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
  $cmake --build "$build" --parallel "${MAX_JOBS:-$(nproc)}" --target _native
} >"$build/build.log" 2>&1 || {
  tail -40 "$build/build.log" >&2
  echo "sanitizer build failed; the whole log is $build/build.log" >&2
  exit 1
}

site=$build/site
rm -rf "$site"
mkdir -p "$site"
cp -rL "$root/bipace_kernels" "$site/"  # -L: integrations/ is a link to the folder at the top
rm -f "$site"/bipace_kernels/_native*.so
cp "$build"/_native*.so "$site/bipace_kernels/"

# The runtime must be loaded before everything else, libstdc++ with it so that it finds the real __cxa_throw.
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so.6)"

# PYTHONMALLOC=malloc puts every Python object into a block of its own, so that reading past a string's end is seen.
under_sanitizers() {
  (cd "$site" && env LD_PRELOAD="$preload" PYTHONMALLOC=malloc PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 \
    "$python" "$@")
}

under_sanitizers - "$site" <<'PY'
import ctypes, sys
import bipace_kernels._native as native

assert native.__file__.startswith(sys.argv[1]), native.__file__
assert hasattr(ctypes.CDLL(None), "__asan_init"), "the sanitizer's runtime is not loaded"
assert b"__asan_report_load8" in open(native.__file__, "rb").read(), "the module is not instrumented"
PY

emulator=()
if [ $# -gt 0 ]; then
  arguments=()
  for argument in "$@"; do
    [ -e "$root/${argument%%::*}" ] && argument=$root/$argument
    arguments+=("$argument")
  done
else
  arguments=()
  for name in action_keys/test_action_keys backends/test_runtime clusters/test_clusters critic/test_critic \
    embedders/test_ngrams layout/test_layout layout/test_ids metrics/test_metrics observations/test_observations \
    pipeline/test_golden pipeline/test_inputs pipeline/test_theorems; do
    arguments+=("$root/tests/$name.py")
  done
  # x86-64 alone has an emulator; clustering takes minutes under sanitizers, but for two small batches.
  if [ "$(uname -m)" = x86_64 ]; then
    emulator+=("$root/tests/values/test_device_values.py")
    for name in few_long_groups_among_many_short_ones; do
      emulator+=("$root/tests/clusters/test_device_cuda_clusters.py::test_$name")
    done
    for name in rows_that_end_within_sixteen_bytes rows_of_extreme_length rows_of_any_order_and_stride; do
      emulator+=("$root/tests/clusters/test_device_cuda_gram.py::test_$name")
    done
  fi
fi
under_sanitizers -m pytest -q -p no:cacheprovider --capture=sys -c "$root/pyproject.toml" --rootdir "$root" \
  -m "not slow and not gpu" "${arguments[@]}"
if [ ${#emulator[@]} -gt 0 ]; then
  # Every fibre would have a stack of its own for what detect_stack_use_after_return watches: minutes.
  export ASAN_OPTIONS=$ASAN_OPTIONS:detect_stack_use_after_return=0
  BIPACE_TEST_BACKEND=cuda BIPACE_EMULATOR=1 BIPACE_EMULATOR_SANITIZE=1 under_sanitizers -m pytest -q \
    -p no:cacheprovider --capture=sys -c "$root/pyproject.toml" --rootdir "$root" -m "not slow and not gpu" \
    "${emulator[@]}"
fi
if [ $# -eq 0 ]; then
  under_sanitizers "$root/tests/native/fuzz_ops.py" 4000 2
fi
echo "sanitize: no report of AddressSanitizer or UndefinedBehaviorSanitizer"
