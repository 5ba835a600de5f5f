"""What a notebook user imports from ``recbft``: a data set, a recommender, a comparison."""

from recbft.api.recommender import Dataset, Recommender

__all__ = ["Dataset", "Recommender"]
