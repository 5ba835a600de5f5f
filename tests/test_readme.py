"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    events = pd.DataFrame(
        {
            "user": np.repeat([f"user {n}" for n in range(60)], 8),
            "item": [f"item {i}" for i in rng.integers(1, 31, 480)],
            "timestamp": np.arange(480),
        }
    )
    events.to_csv(tmp_path / "ratings.csv", index=False)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("epochs=50", "epochs=1"), {})  # the text is the project's own
    printed = capsys.readouterr().out
    assert "'ndcg@10'" in printed and "new user" in printed
    assert (tmp_path / "runs" / "mine" / "metrics.json").is_file()


def test_every_page_the_readme_names_exists():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (README.parent / link).exists()]


def test_the_citation_names_the_version_and_licence_of_the_package():
    citation = yaml.safe_load((README.parent / "CITATION.cff").read_text(encoding="utf-8"))
    project = (README.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{citation["version"]}"\n' in project
    assert f'\nlicense = "{citation["license"]}"\n' in project
