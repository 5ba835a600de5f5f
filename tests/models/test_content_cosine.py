"""The content of a user's last events against that of every item."""

from __future__ import annotations

import pytest
import torch

from recbft.datasets.batches import history_batches
from recbft.errors import UserError
from recbft.models import MODELS
from recbft.models.content_cosine import ContentCosine, ContentCosineConfig
from tests.models.conftest import packed

# Items 1 to 4: two that point one way, one across, one between; 5 has nothing.
CONTENT = torch.tensor([[0, 0], [1, 0], [1, 0], [0, 1], [0.6, 0.8], [0, 0]], dtype=torch.float64)


def scores(config, histories):
    model = ContentCosine(config, CONTENT).double()
    batch = packed(histories)
    return model.user_states(batch).state @ model.item_table().weight.T


def test_a_score_is_the_sum_of_cosines_by_the_age_of_the_events():
    found = scores(ContentCosineConfig(content_events=3, content_decay=0.5), [[1, 3, 4], [5], [3, 3, 1, 5, 4]])
    # g = x_4 + x_3 / 2 + x_1 / 4;   nothing;   x_4 + x_5 / 2 + x_1 / 4
    g = torch.tensor([[0.85, 1.3], [0, 0], [0.85, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(found, g @ CONTENT.T)


def test_an_event_before_the_last_ones_does_not_count_and_a_decay_of_one_counts_all_alike():
    config = ContentCosineConfig(content_events=2, content_decay=1)
    one, other = scores(config, [[1, 3, 4], [3, 4, 3]])
    torch.testing.assert_close(one, other)


def test_the_events_that_are_read_suffice():
    model = ContentCosine(ContentCosineConfig(content_events=2), CONTENT).double()
    items = torch.tensor([3, 3, 1, 2, 4, 3]).numpy()
    start, stop = torch.tensor([0, 4]).numpy(), torch.tensor([4, 6]).numpy()
    (batch,) = history_batches(items, start, stop, max_length=model.max_length)
    assert batch.items.shape[1] == 2
    torch.testing.assert_close(model.user_states(batch).state, model.user_states(packed([[3, 3, 1, 2], [4, 3]])).state)


def test_without_item_features_there_is_no_such_model():
    spec = MODELS["content-cosine"]
    with pytest.raises(UserError, match=r"compares the content of items, but the data has no .*--items.*another model"):
        spec.make(spec.config(), None, torch.zeros(6), seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"content_events": 0}, "content_events is 0; give a whole number >= 1"),
     ({"content_decay": 1.5}, "content_decay is 1.5; give a number > 0 and <= 1"),
     ({"content_width": 1}, "content_width is 1; give a whole number >= 2")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ContentCosineConfig(**settings)
