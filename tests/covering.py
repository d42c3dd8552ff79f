"""Tables of test cases in which every pair of values of two features occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[str, int, str, int]  # names of features and the places of their values


def pairs(case: Mapping[str, int]) -> set[Pair]:
    """Of a case, given by the places of its values."""
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(sorted(case), 2)}


def all_pairs(features: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Every pair that there is."""
    return {
        (a, i, b, j)
        for a, b in itertools.combinations(sorted(features), 2)
        for i, j in itertools.product(range(len(features[a])), range(len(features[b])))
    }


def covering(features: Mapping[str, Sequence[Any]], seed: int = 0, draws: int = 300) -> list[dict[str, Any]]:
    """Cases, each a value for every feature; of `draws` random ones that with most pairs left is taken each time.

    A seed gives the same table everywhere.
    """
    generator = random.Random(seed)
    missing, found = all_pairs(features), []
    while missing:
        tried = [{name: generator.randrange(len(v)) for name, v in features.items()} for _ in range(draws)]
        best = max(tried, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        found.append({name: features[name][place] for name, place in best.items()})
    return found
