#!/usr/bin/env bash
# Run the fast tests with the oldest versions that pyproject.toml allows, in a virtual environment made for it:
#
#   tests/check_lowest.sh [FOLDER]      folder for the environment, kept; a temporary one if left out
#
# The bounds are read out of pyproject.toml: what recbft needs, and the extras report, tune, tensorboard and test.
# torch and triton are left to pip, since their oldest builds are gigabytes with CUDA; TORCH=2.6.0 chooses torch's.
# PYTHON chooses the interpreter; 3.10 and 3.11 have wheels of everything that old. The tests are those of what meets
# other packages: the command line, data, evaluation, reports, the API and saved files. Exit code 1 if any failed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
mkdir -p "$folder"

lowest() { # "name>=1.2" of pyproject.toml as "name==1.2"
  "$folder/bin/python" - "$root/pyproject.toml" <<'EOF'
import re
import sys

text = open(sys.argv[1], encoding="utf-8").read()  # Python 3.10 has no tomllib
lists = [re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL).group(1)
         for name in ("dependencies", "report", "tune", "tensorboard", "test")]
bounds = re.findall(r'"([\w-]+)>=([\d.]+)', " ".join(lists))
print(*(f"{name}=={version}" for name, version in bounds if name not in ("torch", "triton")))
EOF
}

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
versions=$(lowest)
echo "$("$folder/bin/python" -V): $versions"
# torch goes first, so that no other requirement chooses a larger build of it.
$pip "torch${TORCH:+==$TORCH}"
# Under pyparsing 3.3 the oldest matplotlib warns of its own calls.
$pip $versions 'pyparsing<3.3'
$pip --no-deps -e "$root"
cd "$root"
OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest -q -m 'not slow' tests/cli tests/datasets tests/evaluation \
  tests/reporting tests/training/test_checkpoint.py tests/training/test_run_folder.py tests/test_*.py
