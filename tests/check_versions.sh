#!/usr/bin/env bash
# Run the whole suite with the lowest versions that pyproject.toml names, on Python 3.10, and with the newest ones, on 3.15:
#
#   tests/check_versions.sh [lowest|newest] [FOLDER]      both unless one is named; FOLDER for the environments, kept;
#                                                         a temporary one if left out
#
# PyTorch comes from PyPI, which takes some 5 GB an environment. A Python that is not installed is left out and said so.
# Exit code 1 if any failed. PyTorch 2.6 brings Triton 3.2, with which the tests of Triton's kernels are skipped.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
which=both
case ${1:-} in lowest | newest) which=$1 && shift ;; esac
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
failed=0

# name>=version of the dependencies and of the named extras, as name==version; what is not for here is left to pip.
lowest() {
  python3 - "$root/pyproject.toml" <<'END'
import re, sys
text = open(sys.argv[1]).read()
for listed in re.findall(r'^(?:dependencies|tensorboard|report|tune|test|recbole-bare) = \[(.*?)\]$', text, re.M | re.S):
    for name, version in re.findall(r'"([a-z0-9-]+)>=([0-9.]+)"', listed):
        print(f"{name}=={version}")
END
}

check() { # name, python, then what is installed
  local name=$1 python=$2
  shift 2
  if ! "$python" -c 'import venv' 2>/dev/null; then
    echo "$name: left out, $python is not installed"
    return
  fi
  local pip="$folder/$name/bin/python -m pip install --quiet --disable-pip-version-check"
  { [ -d "$folder/$name" ] || "$python" -m venv "$folder/$name"; } &&
    $pip "$@" &&
    $pip --no-deps recbole==1.2.1 -e "$root" &&
    (cd "$root" && OMP_NUM_THREADS=1 "$folder/$name/bin/python" -m pytest -n auto --maxprocesses 4)
  if [ $? -eq 0 ]; then echo "$name: passed"; else echo "$name: FAILED"; failed=1; fi
}

# matplotlib 3.8 calls what later versions of pyparsing warn of.
[ $which = newest ] || check lowest python3.10 $(lowest | sort -u) 'pyparsing<3.3'
[ $which = lowest ] || check newest python3.15 torch numpy scipy pandas pyarrow pyyaml typer rich safetensors \
  tensorboard matplotlib optuna pytest hypothesis pytest-xdist scikit-learn texttable colorlog colorama tqdm psutil
exit $failed
