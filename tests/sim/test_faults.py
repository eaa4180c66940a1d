"""Gangs of two to four nodes under random faults: never two generations or releases at once, and always back again.

`PPDEPLOY_SIM_RUNS` sets how many stories are told (each is a few minutes of virtual time and about 0.2 s
of a core), and `PPDEPLOY_SIM_SEED` where to begin: `make sim` tells thousands. A failure names its seed.
"""

from __future__ import annotations

import os

import pytest

from tests.sim import faults
from tests.sim.world import World

RUNS = int(os.environ.get("PPDEPLOY_SIM_RUNS", "80"))
FIRST = int(os.environ.get("PPDEPLOY_SIM_SEED", "0"))
CHUNKS = 8


@pytest.mark.timeout(0 if RUNS > 1000 else 300)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_two_generations_no_mixed_releases_and_serving_again(chunk: int) -> None:
    for seed in range(FIRST + chunk, FIRST + RUNS, CHUNKS):
        world = World(seed, 2 + seed % 3, faults.PATIENT, loss=0.02 if seed % 2 else 0.1)
        try:
            faults.story(world, faults.ALL, count=12, pause=(2.0, 6.0, 15.0)[seed % 5 % 3])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
