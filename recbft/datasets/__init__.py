"""From events to histories, vocabulary, split and views; nothing here knows a model."""

from recbft.datasets.content import Content, ContentConfig, ItemContent
from recbft.datasets.dataset import Dataset
from recbft.datasets.events import Events
from recbft.datasets.features import ItemFeatures
from recbft.datasets.formats import read_table
from recbft.datasets.loading import card, card_names, default_dataset, is_available
from recbft.datasets.planted import synthetic_dataset
from recbft.datasets.prepare import Preparation
from recbft.datasets.split import Splitting, View, leave_one_out
from recbft.datasets.statistics import describe
from recbft.datasets.synth import SyntheticConfig, generate, save_synthetic

__all__ = [
    "Content",
    "ContentConfig",
    "Dataset",
    "Events",
    "ItemContent",
    "ItemFeatures",
    "Preparation",
    "Splitting",
    "SyntheticConfig",
    "View",
    "card",
    "card_names",
    "default_dataset",
    "describe",
    "generate",
    "is_available",
    "leave_one_out",
    "read_table",
    "save_synthetic",
    "synthetic_dataset",
]
