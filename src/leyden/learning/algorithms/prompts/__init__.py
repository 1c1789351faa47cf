"""Optimisers of prompts: a closed registry by the name that `learn.algorithm` takes. No torch."""

from collections.abc import Mapping

from leyden.learning.algorithms.prompts.apo import Apo
from leyden.learning.algorithms.prompts.base import Arena, Candidate, Optimiser, Scored, Trial
from leyden.learning.algorithms.prompts.bootstrap_demos import BootstrapDemos
from leyden.learning.algorithms.prompts.gepa import Gepa

__all__ = ["OPTIMISERS", "Arena", "Candidate", "Optimiser", "Scored", "Trial"]

OPTIMISERS: Mapping[str, Optimiser] = {optimiser.name: optimiser for optimiser in (BootstrapDemos(), Apo(), Gepa())}
"""Every optimiser that can be configured."""
