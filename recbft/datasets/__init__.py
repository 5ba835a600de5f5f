"""From events to histories, vocabulary and leave-one-out views; nothing here knows a model."""

from recbft.datasets.cards import Card, card, card_names, dataset_names, default_dataset, is_available
from recbft.datasets.dataset import Dataset
from recbft.datasets.events import Events
from recbft.datasets.prepare import Preparation
from recbft.datasets.readers import read_table
from recbft.datasets.split import Split, View, leave_one_out
from recbft.datasets.statistics import DatasetStatistics, describe
from recbft.datasets.synth import Synthetic, SyntheticConfig, generate, save_synthetic, synthetic_dataset
from recbft.datasets.vocabulary import Vocabulary, canonical_text

__all__ = [
    "Card",
    "Dataset",
    "DatasetStatistics",
    "Events",
    "Preparation",
    "Split",
    "Synthetic",
    "SyntheticConfig",
    "View",
    "Vocabulary",
    "canonical_text",
    "card",
    "card_names",
    "dataset_names",
    "default_dataset",
    "describe",
    "generate",
    "is_available",
    "leave_one_out",
    "read_table",
    "save_synthetic",
    "synthetic_dataset",
]
