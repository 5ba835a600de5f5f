"""The log of production size, at a small one."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from benchmarks.large_log import generate, main
from recbft import Dataset


@pytest.mark.parametrize("seed", range(3))
def test_both_kinds_of_ids_are_one_log_with_long_and_short_histories(seed):
    tables = [generate(300, 6000, 500, texts=texts, seed=seed) for texts in (False, True)]
    numbers, texts = (Dataset.from_frame(table, time="timestamp") for table in tables)
    assert numbers.items.tolist() == texts.items.tolist() and numbers.offsets.tolist() == texts.offsets.tolist()
    assert numbers.num_users == 300 and 5500 < numbers.num_events < 6500
    assert numbers.lengths.min() >= 5 and numbers.lengths.max() > 4 * numbers.lengths.mean()
    counts = sorted(numbers.training_counts)[::-1]
    assert sum(counts[:50]) > 0.3 * sum(counts)


def test_the_command_writes_what_recbft_reads(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "log"), "--users", "20", "--events", "300", "--items", "40", "--csv"]) == 0
    rows = pq.read_table(tmp_path / "log" / "log.parquet").num_rows
    assert f"{rows:,} events of 20 users written to" in capsys.readouterr().out
    hashes = {
        Dataset.load(tmp_path / "log" / f"log.{end}", time="timestamp").content_hash for end in ("parquet", "csv")
    }
    assert len(hashes) == 1
