"""What vLLM calls in each of its processes (API server, engine, workers) before it reads its own configuration."""

from __future__ import annotations

import logging
import os

from ppdeploy_handoff import settings as environment
from ppdeploy_handoff import versions
from ppdeploy_handoff.settings import Mode

log = logging.getLogger("vllm.ppdeploy_handoff")
_done = False


def register() -> None:
    """Change vLLM as the environment asks, once a process; with `off` or nothing set it imports and changes nothing.

    A wrong value raises ValueError and so ends the server's start: a typing error must not look like a slow link.
    """
    global _done
    if _done:
        return
    _done = True
    settings = environment.from_env(os.environ)
    if settings.mode is Mode.OFF and not settings.switch:
        return
    import vllm
    from vllm.platforms import current_platform

    why = versions.refused(vllm.__version__, current_platform.device_type)
    if why is not None:
        log.warning("ppdeploy_handoff: handoffs stay as vLLM sends them: %s", why)
        return
    from ppdeploy_handoff import stagger, worker
    from ppdeploy_handoff.counters import Counters, folder_for_children

    counters = Counters(folder_for_children(environment.COUNTERS))
    worker.install(worker.Handoff(settings, counters))
    if settings.switch or (settings.mode.overlaps and settings.stagger != 0):
        stagger.install(settings, counters)
