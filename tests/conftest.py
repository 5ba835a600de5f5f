"""Settings for all tests: no time limit per hypothesis example, since a busy machine is not a failing one."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("recbft", deadline=None)
settings.load_profile("recbft")
