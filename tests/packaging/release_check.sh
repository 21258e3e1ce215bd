#!/usr/bin/env bash
# Builds wheel and sdist, checks both files, installs each in an empty environment and runs the tests of a release there
# (those of cibuildwheel in pyproject.toml).  PYTHON builds; TORCH is what the environments get.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$PWD/out/release
tests="clusters/test_clusters.py pipeline/test_theorems.py pipeline/test_golden.py pipeline/test_inputs.py
  pipeline/test_interop.py backends/test_runtime.py backends/test_cuda_loader.py"
rm -rf "$out" && mkdir -p "$out"

"$PYTHON" -m build --quiet --outdir "$out/dist" .
"$PYTHON" -m twine check --strict "$out"/dist/*
# W002: copies of a file; the package has several empty __init__.py.
"$PYTHON" -m check_wheel_contents --ignore W002 --toplevel bipace_cli,bipace_kernels "$out"/dist/*.whl

cp -r tests pyproject.toml "$out"  # so that the installed package is tested and not the checkout's
for file in "$out"/dist/*.whl "$out"/dist/*.tar.gz; do
  echo "== $(basename "$file")"
  python="$out/environment/bin/python"
  rm -rf "$out/environment" && "$PYTHON" -m venv "$out/environment"
  "$python" -m pip install -q "$TORCH"
  "$python" -m pip install -q "$file"
  (cd "$out" && "$python" -c "import bipace_kernels as bk; assert bk.backends()['cpu'].available, bk.backends()['cpu']")
  (cd "$out" && "$python" -m bipace_kernels.cli 2>&1 || true) | grep -F "bipace-kernels[cli]"
  "$python" -m pip install -q "pytest>=8" "hypothesis>=6.100" "xxhash>=3.4"
  # shellcheck disable=SC2086
  (cd "$out/tests" && "$python" -m pytest -q -p no:cacheprovider -m "not slow and not gpu" $tests)
done
