"""What stands beside results: the command without the places of one machine."""

from __future__ import annotations

import pytest

from recbft.comparing.provenance import recorded
from recbft.reporting.tables import markdown_table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-d", "/home/ann/x.csv"], "-d x.csv"),
        (["-d/home/ann/x.csv", "-j", "2"], "-d x.csv -j 2"),
        (["--dataset=/home/ann/x.csv"], "--dataset x.csv"),
        (["--external=o=/home/ann/o.csv", "--external", "p=p.csv"], "--external o=o.csv --external p=p.csv"),
        (
            ["--set", "data.data_root=/home/ann", "--set=training.epochs=3"],
            "--set data.data_root=ann --set training.epochs=3",
        ),
        (["--out", "/home/ann/x", "/home/ann/runs/a", "b"], "--out OUT a b"),
    ],
)
def test_no_place_of_this_machine_is_written(arguments, said):
    assert recorded("recbft compare", arguments) == f"recbft compare {said}"


def test_a_bar_in_a_name_is_no_column():
    assert markdown_table(["a|b"], [["c|d"]]).splitlines() == ["| a\\|b |", "| --- |", "| c\\|d |"]
