"""Asking the other agents: one thread for each peer, one question at a time, one second for each (rules 1 and 23)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ppdeploy.agent import contact, wire
from ppdeploy.agent.clock import now
from ppdeploy.agent.contact import Poll
from ppdeploy.agent.messages import Member
from ppdeploy.agent.signing import HEADER, UnprovenError, new_nonce, unseal

LIMIT = 1.0
_REPLY_LIMIT = 1 << 16
_AGAIN = 0.3


class Poller:
    """Asks one peer again and again, until stopped. Ended polls go into `ended`; `wake` is called after each."""

    def __init__(
        self,
        peer: Member,
        port: int,
        key: bytes,
        place: tuple[str, str],
        ended: queue.SimpleQueue[Poll],
        wake: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.interval = 0.3
        self._port = port
        self._key = key
        self._place = place
        self._ended = ended
        self._wake = wake
        self._stopped = threading.Event()
        threading.Thread(target=self._work, name=f"poll-{peer.name}", daemon=True).start()

    def stop(self) -> None:
        """Ask no more; an answer still under way is dropped."""
        self._stopped.set()

    def _work(self) -> None:
        while not self._stopped.is_set():
            poll = ask(self.peer, self._port, self._key, self._place)
            if self._stopped.is_set():
                return
            self._ended.put(poll)
            self._wake()
            # A peer that fails is asked again soon: a lease needs several failures in a row.
            self._stopped.wait(self.interval if poll.kind == contact.OK else min(self.interval, _AGAIN))


def ask(peer: Member, port: int, key: bytes, place: tuple[str, str]) -> Poll:
    """Ask a peer once, and return what came of it: an answer that is proven, or why there is none."""
    sent, nonce = now(), new_nonce()
    try:
        reply = wire.get(peer.address, port, f"/v1/state?nonce={nonce}", LIMIT, _REPLY_LIMIT)
        if reply.status != 200:
            return Poll(peer.name, sent, contact.INVALID, error=f"its agent answered {reply.status}")
        answer = unseal(key, nonce, peer, place, reply.body, reply.headers.get(HEADER, ""))
    except ConnectionRefusedError:
        return Poll(peer.name, sent, contact.REFUSED, error="its host is up, its agent is not")
    except OSError as error:
        what = "no answer within 1 s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Poll(peer.name, sent, contact.SILENT, error=what)
    except (ValueError, UnprovenError) as error:
        return Poll(peer.name, sent, contact.INVALID, error=str(error))
    return Poll(peer.name, sent, contact.OK, answer=answer)
