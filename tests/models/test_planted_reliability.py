"""Where the reliability of items is known, the precision that is learned is that reliability."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from recbft.datasets import Dataset, SyntheticConfig
from recbft.datasets.synth import generate
from recbft.training.bundle import load_trained
from recbft.training.one_run import train
from recbft.training.run_config import load_run_config

SETTINGS = ["hidden_size=32", "batch_size=32", "dropout=0.3", "epochs=12", "training.threads=1"]


def test_credibility_finds_which_items_are_noise(tmp_path):
    planted = generate(
        SyntheticConfig(
            num_users=800,
            num_items=200,
            item_reliabilities=(1.0, 0.2),
            item_shares=(0.5, 0.5),
            user_reliabilities=(1.0,),
            user_shares=(1.0,),
            seed=0,
        )
    )
    dataset = Dataset.from_frame(planted.events, name="planted", time="timestamp")
    config = load_run_config(
        None, [*SETTINGS, "core.initial=credibility", "core.prior_events=30"], model="sasrec", arm="bft", seed=0
    )
    *_, model = load_trained(train(config, tmp_path / "run", dataset=dataset).path)
    items = torch.arange(1, dataset.num_items + 1)
    with torch.no_grad():
        learned = model.item_precision(items, model.item_embedding(items))[:, 0].numpy()
    truth = planted.items.set_index("item_id").loc[dataset.decode(items.numpy()), "reliability"].to_numpy()
    assert stats.spearmanr(learned, truth).statistic > 0.5  # .87 at most, since the truth has two levels
    noise, taste = (np.exp(np.log(learned[truth == level]).mean()) for level in (0.2, 1.0))
    assert taste > 4 * noise
