#!/usr/bin/env bash
# Build the wheel, install it with each extra where nothing else is installed, and try what the extra is for:
#
#   tests/check_wheel.sh [-f FOLDER] [EXTRA...]      every extra of pyproject.toml but test and dev unless some are named;
#                                                    FOLDER for the environment, kept; a temporary one if left out
#
# One environment serves all: torch goes in first, in the version of constraints.txt, then the wheel alone ("none"), and
# what an extra has brought is removed before the next one. PYTHON chooses the interpreter. Exit code 1 if any failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=
[ "${1:-}" = -f ] && folder=$2 && shift 2
folder=${folder:-$(mktemp -d)}
mkdir -p "$folder/wheel"
python="$folder/bin/python"
pip="$python -m pip --disable-pip-version-check --quiet"
failed=0
export OMP_NUM_THREADS=1 MLFLOW_DISABLE_TELEMETRY=true WANDB_MODE=offline WANDB_SILENT=true
unset RECBFT_DATA_ROOT PYTHONPATH

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder" || exit 1
$pip install -c "$root/constraints.txt" torch || exit 1
rm -f "$folder"/wheel/*
# From a copy: a build leaves a folder in its sources, whose files a later one would take along.
mkdir "$folder/source" && (cd "$root" && git archive HEAD) | tar -x -C "$folder/source" &&
  $pip wheel --no-deps -w "$folder/wheel" "$folder/source" || exit 1
rm -rf "$folder/source"
wheel=$(ls "$folder"/wheel/*.whl)
$pip install --force-reinstall --no-deps "$wheel" && $pip install "$wheel" || exit 1
[ -f "$folder/alone.txt" ] || $pip freeze >"$folder/alone.txt"

if [ $# = 0 ]; then
  set -- none $("$python" - "$root/pyproject.toml" <<'END'
import re, sys
text = open(sys.argv[1]).read().split("[project.optional-dependencies]")[1].split("\n[")[0]
print(*(name for name in re.findall(r"^([a-z-]+) = \[", text, re.M) if name not in ("test", "dev")))
END
)
fi

SMALL="-q -d events.csv --user who --item what --time when --set epochs=1 --set hidden_size=8 --set max_length=8 --set device=cpu"
train() { recbft train $SMALL --out runs "$@"; }

try_none() {
  recbft models >models.txt && train --name run && recbft recommend runs/run --histories events.csv -k 3 --out lists.csv &&
    grep -q probability lists.csv && recbft train --config "$(configs)/quickstart.yaml" -d synthetic --set epochs=1 -q
}
configs() { python -c 'import recbft_configs; print(*recbft_configs.__path__)'; }
try_tensorboard() { train --name run --set trackers=tensorboard && ls runs/run/tensorboard/events*; }
try_mlflow() { train --name run --set trackers=mlflow && ls mlflow.db && ls mlruns/*/*/artifacts/card.md; }
try_wandb() { train --name run --set trackers=wandb && ls wandb/offline-run-*/*.wandb; }
try_report() {
  recbft compare -d events.csv --arms matched,bft --seeds 0-1 -j 1 --out compared --set data.user=who --set data.item=what \
    --set data.time=when --set epochs=1 --set hidden_size=8 --set device=cpu >compare.txt &&
    recbft report compared --format html,svg >report.txt && [ -n "$(find compared/report -name "*.svg")" ]
}
try_tune() {
  recbft tune -d events.csv --space learning_rate=1e-3,1e-2 --trials 2 --seeds 0 -j 1 --out tuned --set data.user=who \
    --set data.item=what --set data.time=when --set epochs=1 --set hidden_size=8 --set device=cpu
}
try_serve() {
  train --name run || return 1
  recbft serve runs/run --port 18765 --workers 1 >serve.log 2>&1 &
  local pid=$! ok=1
  for _ in $(seq 60); do
    sleep 1
    python -c "from urllib.request import urlopen as get; print(get('http://127.0.0.1:18765/healthz').read(), len(get('http://127.0.0.1:18765/openapi.json').read()))" && ok=0 && break
  done 2>/dev/null
  kill $pid && wait $pid
  [ $ok = 0 ] || { cat serve.log; return 1; }
}
try_export() { train --name run && recbft export runs/run --format onnx --out exported && ls exported/encoder.onnx; }
try_ann() { train --name run && recbft export runs/run --format torch --index faiss --out exported && ls exported/index.faiss; }
try_transformers() {
  python - <<'END'
from transformers import LlamaConfig, LlamaForCausalLM
from recbft.pretrained import track_precision

sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
track_precision(LlamaForCausalLM(LlamaConfig(**sizes))).save_pretrained("tracked")
END
}
try_recbole() {
  python - <<'END'
import recbft.recbole
from recbole.quick_start import run_recbole

settings = {"epochs": 1, "train_neg_sample_args": None, "hidden_size": 8, "state": "ERROR", "show_progress": False}
settings |= {"MAX_ITEM_LIST_LENGTH": 8, "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"}}
print(run_recbole(model="SASRecBFT", dataset="ml-100k", config_dict=settings)["test_result"])
END
}
try_recbole-bare() { $pip install --no-deps recbole==1.2.1 && try_recbole; }

check() { # extra
  local extra=$1 place="$folder/try-$1" what="$wheel"
  [ "$extra" = none ] || what="$wheel[$extra]"
  $pip freeze | grep -vxFf "$folder/alone.txt" | sed 's/ @ .*//; s/==.*//' >"$folder/brought.txt"
  [ ! -s "$folder/brought.txt" ] || $pip uninstall -y -r "$folder/brought.txt"
  $pip install "$what" || return 1
  $pip check
  rm -rf "$place" && mkdir "$place" && cd "$place" || return 1
  PATH="$folder/bin:$PATH"
  python -c "
import random
print('who,what,when')
for n in range(600): print(f'u{n % 50},i{random.Random(n).randrange(40)},{n}')" >events.csv
  if declare -F "try_$extra" >/dev/null; then "try_$extra"; else
    echo "$extra: nothing here tries what it is for; add try_$extra to $0" >&2
    recbft models >models.txt
  fi
}

for extra; do
  if (check "$extra" >"$folder/$extra.log" 2>&1); then echo "$extra: passed"; else
    failed=1
    tail -n 20 "$folder/$extra.log"
    echo "$extra: FAILED, all of it in $folder/$extra.log"
  fi
done
exit $failed
