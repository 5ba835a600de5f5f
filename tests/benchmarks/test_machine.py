from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path

import pytest

from benchmarks import machine
from recbft.datasets import Dataset


def test_the_header_names_versions_device_and_data_but_no_host_and_no_place(events):
    dataset = Dataset.load(events, time="timestamp")
    header = machine.close(machine.header("python -m benchmarks.machine", dataset))
    text = "\n".join(machine.lines(header))
    assert dataset.content_hash[:12] in text and header["torch"] in text and header["cpu"] in text
    assert header["data"]["content_hash"] == dataset.content_hash
    everything = (text + json.dumps(header)).split()
    for private in (platform.node(), str(Path.home()), getpass.getuser(), str(events.parent)):
        assert private not in everything


def test_its_command_takes_help_and_nothing_else(capsys):
    for arguments, code in (["--help"], 0), (["amazon-beauty"], 2):
        with pytest.raises(SystemExit) as end:
            machine.main(arguments)
        assert end.value.code == code and "usage:" in "".join(capsys.readouterr())
    assert machine.main([]) == 0 and "recbft" in capsys.readouterr().out


def test_peak_memory_is_in_megabytes():
    assert 30 < machine.peak_rss_mb() < 30_000
