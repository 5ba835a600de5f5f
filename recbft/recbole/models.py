"""The classes that RecBole's names stand for, and the trainers and data sets it looks for under the same names."""

from __future__ import annotations

from typing import Any

import recbole.data.dataset
import recbole.trainer

from recbft.config.recbole_yaml import ADAPTED
from recbft.recbole.adapter import Adapter
from recbft.recbole.trainer import PrecisionTrainer, TimedDataset

for _name in ADAPTED:
    globals()[_name] = type(
        _name, (Adapter,), {"name": _name, "__module__": __name__, "__doc__": f"RecBole's ``{_name}``."}
    )
    setattr(recbole.trainer, f"{_name}Trainer", PrecisionTrainer)
    setattr(recbole.data.dataset, f"{_name}Dataset", TimedDataset)


def adapter_for(model: str) -> Any:
    """The class that holds one of recbft's models; where two names do, the first."""
    return globals()[next(name for name, adapted in ADAPTED.items() if adapted.model == model)]
