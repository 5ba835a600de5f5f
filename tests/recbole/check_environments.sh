#!/usr/bin/env bash
# Run the RecBole tests under other Pythons and versions, each in a virtual environment that is made for it:
#
#   tests/recbole/check_environments.sh [FOLDER]      folder for the environments, kept; a temporary one if left out
#
#   3.11 as pip resolves RecBole; 3.11 with numpy 1.26 and pandas 2;
#   3.12 with numpy 2 and pandas 2.3; 3.13 and 3.14 with numpy 2 and pandas 3 (these without RecBole's own requirements)
#
# A Python that is not installed is left out and said so. Exit code 1 if any environment failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
runtime='texttable colorlog colorama tensorboard tqdm scikit-learn psutil hyperopt'
failed=0

check() { # name, python, then what RecBole is installed with: "resolved" or "bare", then more requirements
  local name=$1 python=$2 how=$3
  shift 3
  if ! "$python" -c 'import venv' 2>/dev/null; then
    echo "$name: left out, $python is not installed"
    return
  fi
  local pip="$folder/$name/bin/python -m pip install --quiet --disable-pip-version-check"
  # torch goes first, so that no other requirement chooses a larger build of it.
  { [ -d "$folder/$name" ] || "$python" -m venv "$folder/$name"; } &&
    $pip torch &&
    if [ "$how" = resolved ]; then $pip recbole==1.2.1 hyperopt; else $pip $runtime && $pip --no-deps recbole==1.2.1; fi &&
    $pip "$@" -e "$root[test]" &&
    (cd "$root" && OMP_NUM_THREADS=1 "$folder/$name/bin/python" -m pytest tests/recbole tests/config/test_recbole_yaml.py -q)
  if [ $? -eq 0 ]; then echo "$name: passed"; else echo "$name: FAILED"; failed=1; fi
}

check resolved-3.11 python3.11 resolved
check numpy1-3.11 python3.11 resolved 'numpy<2' 'pandas<3' 'pyarrow<22'
check numpy2-3.12 python3.12 bare 'numpy>=2' 'pandas>=2.3,<3'
check numpy2-3.13 python3.13 bare 'numpy>=2' 'pandas>=3'
check numpy2-3.14 python3.14 bare 'numpy>=2' 'pandas>=3'
exit $failed
