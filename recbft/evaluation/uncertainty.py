"""Does the model know when it is right? Its posterior precision, and what costs nothing, held against the hits.

Right means hit@10: the target's full rank among all items is 10 or better, ties against it. A user's confidence is

    precision         mean over the coordinates of the posterior precision at the last token, where there is one
    negative_entropy  of the softmax over the whole catalogue, in nats        history_length   events before the target
    top_probability   the largest probability of that softmax                 top_10_probability   its ten largest

and AUROC, risk-coverage curve and its area say whether it sorts hits from misses; whether the probabilities themselves
are true, as trained and fitted, is calibration (both in ``confidence``). The distribution is over all items, seen
ones included, whatever ``filter_seen`` is; lists that leave seen items out have probabilities by a fit of their own.

The precision has a ceiling, lam_max, and the last layer's often lies there: ``saturation`` says how much of it does.

``uncertainty`` returns the part ``uncertainty`` of ``probe.json``:

    part, num_users, num_items, k, hit_rate
    intervals       "95 %, N bootstrap resamples of the users", and whether the users are too few for it; every interval
                    is None of one user
    random_aurc, optimal_aurc      of a confidence that says nothing, and of one that puts all hits first
    confidences     name -> {auroc, auroc_interval, aurc, aurc_interval, excess_aurc, num_distinct, verdict,
                    curve: {coverage, risk}, reference_above: {auroc, interval, aurc, aurc_interval}}; the reference is
                    precision, and reference_above how far its areas lie above these (absent from its own entry and
                    without one); of two AURC the lower is the better
    read_out        {kind, learned}: how scores read the precision, and a or nu of (6.18); None where they do not
    saturation      {cap, coordinates, users, num_distinct}: shares of coordinates, and of users with every coordinate,
                    at the cap; distinct precisions; None without precision
    calibration     {temperature, lapse, fitted_on, fitted_users, nll: {before, before_interval, after,
                    after_interval, uniform}, before: {"hit@1", "hit@10"}, after: {"hit@1", "hit@10"}}, each hit@k as
                    ``confidence.calibration`` returns it; before: as trained, after: at temperature and lapse rate;
                    uniform: ln V, that of equal probabilities

Shapes: S histories, N users, D state width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recbft.datasets.dataset import Dataset
from recbft.datasets.split import View
from recbft.evaluation.confidence import Ranking, bootstrap, calibration, compare_confidences, interval
from recbft.evaluation.probability import AS_TRAINED, Predicted, fit, fitting_view, predicted
from recbft.evaluation.ranks import full_ranks
from recbft.evaluation.strata import MIN_USERS
from recbft.evaluation.trace import at_cap as saturated
from recbft.evaluation.trace import trace
from recbft.evaluation.views import Part, batches_of_view, evaluation_mode, states_of_view, view_of
from recbft.models.backbone import Backbone
from recbft.models.contract import SequenceModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
K = 10  # the cut-off of the project's usual metric


class _Read(NamedTuple):
    states: Tensor  # (N, D)
    precision: FloatArray | None  # (N,)
    at_cap: FloatArray | None  # (N,) share of a user's coordinates at the cap


def uncertainty(
    model: SequenceModel,
    dataset: Dataset,
    part: Part = "test",
    *,
    users: IntArray | None = None,
    samples: int = 1000,
    memory_mb: float = 256.0,
) -> dict[str, Any]:
    """The figures above, ready for JSON.

    Args:
        users: row numbers of the users to judge by, and to fit the probabilities on; all unless given.
        samples: of the bootstrap over users.
        memory_mb: bound on the scores held at a time; users by items are never held at once.
    """
    view = view_of(dataset, part, users, next_events=True)
    with torch.inference_mode(), evaluation_mode(model):
        table = model.item_table()
        read = _read(model, dataset, view)
        nothing_seen = np.zeros(len(view.target) + 1, np.int64)
        rank = full_ranks(
            read.states, table, view.target, nothing_seen[:0], nothing_seen, memory_mb=memory_mb,
            user_ids=dataset.user_ids[view.user],
        ).unfiltered  # fmt: skip
        fit_view = fitting_view(dataset, None if users is None else view.user)
        states, _ = states_of_view(model, dataset, fit_view, table.weight.device)
        fitted = fit(states, table, fit_view.target, memory_mb=memory_mb)
        before, after = predicted(
            read.states, table, view.target, calibrations=(AS_TRAINED, fitted), ks=(1, K), memory_mb=memory_mb
        )
    hit = rank <= K
    return {
        "part": part,
        "num_users": int(hit.size),
        "num_items": dataset.num_items,
        "k": K,
        "hit_rate": float(hit.mean()),
        "intervals": f"95 %, {samples} bootstrap resamples of the users{_few(hit.size)}",
        "random_aurc": Ranking(np.zeros(hit.size), hit).risk_area,
        "optimal_aurc": Ranking(hit, hit).risk_area,
        "confidences": compare_confidences(
            _confidences(read, before, view),
            hit,
            reference=None if read.precision is None else "precision",
            samples=samples,
        ),
        "read_out": _read_out(model),
        "saturation": _saturation(model, read),
        "calibration": {
            **fitted._asdict(),
            "fitted_on": "validation",
            "fitted_users": int(fit_view.target.size),
            "nll": {
                **_nll("before", before, samples),
                **_nll("after", after, samples),
                "uniform": math.log(dataset.num_items),
            },
            "before": _calibrations(before, rank, samples),
            "after": _calibrations(after, rank, samples),
        },
    }


def _read(model: SequenceModel, dataset: Dataset, view: View) -> _Read:
    """What the model knows of each user of a view."""
    states, precision, at_cap = [], [], []
    for batch in batches_of_view(model, dataset, view):
        batch = batch.to(model.item_table().weight.device)
        found, layers = trace(model, batch)
        states.append(found.state)
        if found.precision is not None:
            precision.append(found.precision.double().cpu().numpy())
        core = model.core
        if core is not None and layers and layers[-1].outgoing is not None:
            last = layers[-1].outgoing.flatten(0, 1)[batch.last]  # (S, D)
            at_cap.append(saturated(last, core.lam_max).double().mean(dim=-1).cpu().numpy())
    return _Read(
        torch.cat(states),
        np.concatenate(precision) if precision else None,
        np.concatenate(at_cap) if at_cap else None,
    )


def _confidences(read: _Read, before: Predicted, view: View) -> dict[str, FloatArray]:
    own = {} if read.precision is None else {"precision": read.precision}
    return {
        **own,
        "negative_entropy": -before.entropy,
        "history_length": (view.stop - view.start).astype(np.float64),
        "top_probability": before.top[1],
        f"top_{K}_probability": before.top[K],
    }


def _read_out(model: SequenceModel) -> dict[str, Any] | None:
    found = model.precision_read_out if isinstance(model, Backbone) else None
    return None if found is None else {"kind": found.kind, "learned": found.learned}


def _saturation(model: SequenceModel, read: _Read) -> dict[str, Any] | None:
    if read.precision is None or read.at_cap is None or model.core is None:
        return None
    return {
        "cap": float(model.core.lam_max),
        "coordinates": float(read.at_cap.mean()),
        "users": float((read.at_cap == 1).mean()),
        "num_distinct": int(np.unique(read.precision).size),
    }


def _few(users: int) -> str:
    """What is wrong with intervals of so few users."""
    if users == 1:
        return "; none of one user"
    return f"; too narrow with {users} users, {MIN_USERS} are the fewest, as in strata" if users < MIN_USERS else ""


def _nll(when: str, found: Predicted, samples: int) -> dict[str, Any]:
    values = found.nll
    means = bootstrap(lambda weights: weights @ values / values.size, values.size, samples=samples, seed=0)
    return {when: float(values.mean()), f"{when}_interval": interval(means, values.size)}


def _calibrations(found: Predicted, rank: IntArray, samples: int) -> dict[str, Any]:
    return {f"hit@{k}": calibration(p, rank <= k, samples=samples) for k, p in found.top.items()}
