"""The RecBole config beside an exported data set, ready for either of the two."""

from __future__ import annotations

import json
import re
from pathlib import Path

READY = """\
# {title}
# Written by `recbft data prepare --to recbole`. Ready for either of
#   recbft train --config {file}
#   python -c "import recbft.recbole; from recbole.quick_start import run_recbole; \\
#     run_recbole(config_file_list=['{file}'])"
model: SASRecBFT                # BERT4RecBFT, HSTUBFT, HSTU, or any sequential model of RecBole
dataset: {name}
data_path: {folder}
# {time}
USER_ID_FIELD: user_id
ITEM_ID_FIELD: item_id
TIME_FIELD: timestamp
load_col:
  inter: [user_id, item_id, timestamp]
normalize_all: False
MAX_ITEM_LIST_LENGTH: 50
loss_type: CE
train_neg_sample_args: ~        # CE takes no sampled negatives; RecBole's default would draw some
eval_args:                      # leave-one-out, full ranking; RecBole needs all four
  split: {{LS: valid_and_test}}
  order: TO
  group_by: user
  mode: full
repeatable: True
metrics: [Hit, NDCG, MRR]
topk: [5, 10, 20]
valid_metric: NDCG@10
metric_decimal_place: 6
"""


def recbole_name(name: str) -> str:
    """The name for an exported data set: under the name ml-100k RecBole reads its own copy, wherever the file lies."""
    return "ml-100k-sorted" if name == "ml-100k" else re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "data"


def ready_to_run(title: str, file: Path, name: str, *, has_times: bool) -> str:
    """The text of a config for the data set ``name`` in the folder of ``file``."""
    time = "Real times; each user's rows are sorted by them, since RecBole rounds them to single precision."
    if not has_times:
        time = "The data have no real times: timestamp is the number of the event in its history."
    title = title if title.isprintable() else ascii(title)  # a file may call its data by several lines, the next a key
    return READY.format(title=title, file=file, name=json.dumps(name), folder=json.dumps(str(file.parent)), time=time)
