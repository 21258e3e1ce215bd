# Sourced by sanitize.sh and fuzz.sh: configures the checking build and builds the targets named as arguments.
#   PYTHON     interpreter whose extension module is built           (default python3)
#   BUILD      build folder                                          (default build/sanitize)
#   MAX_JOBS   compiler processes                                    (default all cores)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${PYTHON:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") # absolute, and still the link that marks a venv
build=${BUILD:-$root/build/sanitize}

build_checked() {
  local cmake=cmake
  "$python" -c 'import cmake' 2>/dev/null && cmake="$python -m cmake"
  mkdir -p "$build"
  {
    $cmake -S "$root" -B "$build" -DBIPACE_SANITIZE=address,undefined \
      -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)"
    $cmake --build "$build" --parallel "${MAX_JOBS:-$(nproc)}" --target "$@"
  } >"$build/build.log" 2>&1 || {
    tail -40 "$build/build.log" >&2
    echo "sanitizer build failed; the whole log is $build/build.log" >&2
    return 1
  }
}

# Python itself and torch keep memory until the end, which the leak checker would report.
# PYTHONMALLOC=malloc puts every Python object into a block of its own, so that reading past a string's end is seen.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:strict_string_checks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:abort_on_error=1
