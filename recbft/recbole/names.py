"""The names by which RecBole knows our models."""

from __future__ import annotations

from typing import NamedTuple


class Adapted(NamedTuple):
    """A model of ours under a name of RecBole's."""

    model: str  # in recbft.models.MODELS
    arm: str  # unless the config's ``arm`` says otherwise


ADAPTED: dict[str, Adapted] = {
    "SASRecBFT": Adapted("sasrec", "bft"),
    "BERT4RecBFT": Adapted("bert4rec", "bft"),
    "HSTUBFT": Adapted("hstu", "bft"),
    "HSTU": Adapted("hstu", "published"),
}
