"""The runs of small experiments, as in tests/experiments."""

from tests.experiments.conftest import copied, events, trained

__all__ = ["copied", "events", "trained"]
