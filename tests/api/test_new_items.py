"""Items that come after training, from Python and from the shell."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recbft import Dataset, Recommender
from recbft.api.service import Service
from recbft.errors import UserError
from recbft_cli.main import main

TASTES = ("drama", "comedy", "horror")


def events(rng):
    """Every user keeps to one of three genres; 30 items."""
    rows = []
    for user in range(60):
        own = np.arange(30)[np.arange(30) % 3 == user % 3]
        rows += [(f"u{user}", f"i{item}") for item in rng.permutation(own)[:7]]
    return pd.DataFrame(rows, columns=["user_id", "item_id"])


def features(first, last):
    return pd.DataFrame(
        {
            "item_id": [f"i{n}" for n in range(first, last)],
            "genre": [TASTES[n % 3] for n in range(first, last)],
            "title": [f"the {TASTES[n % 3]} of night {n % 7}" for n in range(first, last)],
        }
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    dataset = Dataset.from_frame(events(np.random.default_rng(0)), items=features(0, 30))
    settings = {"epochs": 8, "hidden_size": 8, "batch_size": 16, "threads": 1, "learning_rate": 0.01}
    return Recommender("sasrec", arm="bft", **settings).fit(dataset, out=tmp_path_factory.mktemp("run") / "run")


def test_new_items_are_listed_for_those_who_like_what_they_are(fitted):
    grown = fitted.with_items(features(28, 36))  # two of them are known
    assert len(grown.item_vectors().items) == 36 and len(fitted.item_vectors().items) == 30
    lists = grown.recommend({"ann": ["i0", "i3", "i6"]}, k=10, candidates=[f"i{n}" for n in range(30, 36)])
    assert set(lists["item"][:2]) == {"i30", "i33"}
    read = grown.recommend({"bob": ["i31"]}, k=5)  # a history of a new item alone
    assert read["item"].isin([f"i{n}" for n in range(1, 36, 3)]).mean() >= 0.8
    known = fitted.recommend({"ann": ["i0", "i3"]}, k=20)
    again = grown.recommend({"ann": ["i0", "i3"]}, k=30).merge(known, on=["user", "item"])
    np.testing.assert_allclose(again["score_x"], again["score_y"], rtol=1e-5)
    assert len(again) == 20


def test_events_that_were_never_learned_from_leave_a_vector_and_raise_or_lower_its_score(fitted):
    grown = [fitted.with_items(features(30, 31), events=counts) for counts in (None, {"i30": 0}, {"i30": 50})]
    scores = [one.recommend({"ann": ["i0"]}, k=31).set_index("item")["score"]["i30"] for one in grown]
    assert scores[0] == scores[1]
    assert abs(scores[2] - scores[0]) < 1e-6 + abs(float(fitted._trained.model.item_belief.new_item_delta()))
    with pytest.raises(UserError, match="events counts 'i3', which is none of the new items"):
        fitted.with_items(features(30, 31), events={"i3": 1})


def test_what_the_model_cannot_read_is_said(fitted):
    with pytest.raises(UserError, match="genre"):
        fitted.with_items(pd.DataFrame({"item_id": ["x"], "colour": ["red"]}))
    with pytest.warns(UserWarning, match="1 of 2 new items have no value that the model knows, first 'y'"):
        fitted.with_items(pd.DataFrame({"item_id": ["x", "y"], "genre": ["drama", "opera"]}))


def test_models_of_content_alone_and_joins_list_them_too(fitted, tmp_path):
    """The scores of the old items stay, and those of the new ones are the sums of what both models give."""
    dataset = Dataset.from_frame(events(np.random.default_rng(0)), items=features(0, 30))
    cosine = Recommender("content-cosine", content_width=4).fit(dataset, out=tmp_path / "cosine")
    joined = Recommender.join(fitted, cosine, dataset=dataset, out=tmp_path / "join")
    twice = Recommender.join(joined, cosine, dataset=dataset, by="none", out=tmp_path / "twice")

    def scores(recommender, *history):
        found = recommender.recommend({"ann": list(history)}, k=36, filter_seen=False)
        return found.set_index("item")["score"].sort_index()

    grown = [one.with_items(features(28, 36)) for one in (fitted, cosine, joined, twice)]
    for one, more in zip((cosine, joined, twice), grown[1:], strict=True):
        known = scores(one, "i0", "i3")
        assert len(known) == 30 and len(scores(more, "i0")) == 36
        np.testing.assert_allclose(scores(more, "i0", "i3")[known.index], known, rtol=1e-4, atol=1e-5)
    new, weights = [f"i{n}" for n in range(30, 36)], joined._trained.model.weights.numpy()
    first, second, both = (scores(one, "i0", "i3", "i31")[new] for one in grown[:3])
    np.testing.assert_allclose(both, weights[0, 0] * first + weights[0, 1] * second, rtol=1e-4, atol=1e-5)
    assert second.idxmax() == "i31"


def test_a_model_of_numbers_alone_refuses(fitted, tmp_path):
    dataset = Dataset.from_frame(events(np.random.default_rng(0)), items=features(0, 30))
    plain = Recommender("sasrec", arm="matched", epochs=1, threads=1, hidden_size=8, item_vector="id")
    plain.fit(dataset, out=tmp_path / "run")
    with pytest.raises(UserError, match="this model knows items by their numbers alone"):
        plain.with_items(features(30, 31))
    joined = Recommender.join(fitted, plain, dataset=dataset, out=tmp_path / "join")
    with pytest.raises(UserError, match="the second model of this join knows items by their numbers alone"):
        joined.with_items(features(30, 31))


def test_the_shell_lists_them_too(fitted, tmp_path, capsys):
    features(30, 36).to_csv(tmp_path / "new.csv", index=False)
    pd.DataFrame({"user_id": ["ann"] * 2, "item_id": ["i0", "i3"]}).to_csv(tmp_path / "h.csv", index=False)
    (tmp_path / "only.txt").write_text("i30\ni31\n")
    code = main(
        ["recommend", str(fitted.run.path), "--histories", str(tmp_path / "h.csv"), "-k", "1",
         "--items", str(tmp_path / "new.csv"), "--candidates", str(tmp_path / "only.txt")]
    )  # fmt: skip
    assert code == 0 and ",i30," in capsys.readouterr().out


def test_a_warm_start_reads_features_as_the_older_run_did(fitted, tmp_path):
    """Its catalogue has more comedies, and a genre that the older one lacked: columns would stand in another order."""
    more = features(0, 36)
    more.loc[30:, "genre"] = ["comedy"] * 5 + ["western"]
    more.loc[30:, "title"] = "the comedy of night 1"
    dataset = Dataset.from_frame(
        pd.concat([events(np.random.default_rng(1)), pd.DataFrame({"user_id": "v", "item_id": more.item_id[30:]})]),
        items=more,
    )
    settings = {"epochs": 0, "hidden_size": 8, "threads": 1, "warm_start_keep": 1.0}
    begun = Recommender("sasrec", arm="bft", warm_start=str(fitted.run.path), **settings)
    begun.fit(dataset, out=tmp_path / "run")
    shared = [f"i{n}" for n in range(30)]
    priors = []
    for one in (fitted, begun, Recommender.load(tmp_path / "run")):
        belief, rows = one._trained.model.item_belief, one._trained.vocabulary.encode(shared)
        priors.append(belief.prior(belief.content)[rows].detach().numpy())
    np.testing.assert_allclose(priors[1], priors[0], atol=1e-6)
    np.testing.assert_allclose(priors[2], priors[0], atol=1e-6)


def test_a_saved_run_knows_no_later_items_and_says_so(fitted, tmp_path):
    with pytest.warns(UserWarning, match="without the 6 items that came later"):
        fitted.with_items(features(30, 36)).save(tmp_path / "copy")
    assert len(Recommender.load(tmp_path / "copy").item_vectors().items) == 30


def test_a_service_lists_new_items_and_those_of_another_day(fitted, tmp_path):
    features(28, 31).to_csv(tmp_path / "new.csv", index=False)
    service = Service(fitted.run.path, items=[tmp_path / "new.csv"])
    asked = {"histories": {"ann": ["i0", "i3"]}, "k": 40}
    grown = fitted.with_items(features(28, 31)).recommend({"ann": ["i0", "i3"]}, k=40)
    assert service.recommend(asked)["lists"][0]["items"] == grown["item"].tolist() and "i30" in set(grown["item"])
    assert service.refresh() is None
    features(30, 36).to_csv(tmp_path / "more.csv", index=False)
    (tmp_path / "more.csv").replace(tmp_path / "new.csv")
    assert service.refresh() == "loaded"
    assert {f"i{n}" for n in range(30, 36)} <= set(service.recommend(asked)["lists"][0]["items"])
    (tmp_path / "new.csv").write_text("item_id,colour\ni40,red\n")
    assert service.refresh() == "failed" and len(service.recommend(asked)["lists"][0]["items"]) == 34


def test_a_column_that_new_items_lack_is_told_of(fitted):
    with pytest.warns(UserWarning, match="no column 'title', which the model was trained with"):
        fitted.with_items(features(30, 32).drop(columns="title"))


def test_columns_without_a_value_that_is_known_are_told_of(fitted):
    with pytest.warns(UserWarning, match=r"no value that the new items have of 'genre' \(of 'genre' such as 'Drama'\)"):
        fitted.with_items(features(30, 32).assign(genre="Drama"))


def test_ids_stay_whole_numbers_unless_a_new_one_is_none():
    log = events(np.random.default_rng(0)).assign(item_id=lambda frame: frame["item_id"].str[1:].astype(int))
    known = features(0, 30).assign(item_id=range(30))
    model = Recommender("content-cosine").fit(Dataset.from_frame(log, items=known))
    assert model.with_items(known.head(1).assign(item_id="300")).item_vectors().items.tolist()[-1] == 300
    with pytest.warns(
        UserWarning, match="item ids were whole numbers in training, and some of the new ones are not, as"
    ):
        grown = model.with_items(known.head(2).assign(item_id=["300", "x"]))
    assert grown.item_vectors().items.tolist()[-2:] == ["300", "x"]
