"""Following another process's claim until what it makes is ready.

A follower says hello with a nonce of its own and believes only beats that answer it: a `ready` or `failed`
that an earlier launch left in the folder answers nobody who came later, so nothing outlives its launch,
and no clock is needed to tell old from new. An answered writer that falls silent ends the wait at once when
its process is shown dead (same machine), else when its counter has not moved for `stale_s` of the
follower's own time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError, LawError, WaitTimeoutError
from .claim import BEAT, HELLO, STALE_S, Owner, _doing
from .poll import Clock, SystemClock, Watch, fresh_json, fresh_names, pauses

__all__ = ["follow"]

_log = logging.getLogger(__name__)

#: Seconds between two log lines of a waiting process.
_TELL_S = 30.0

#: Seconds; a limit that is missed by a rounding error is reached at the next look.
_LEAST_PAUSE = 0.001


def follow(
    folder: Path,
    *,
    timeout_s: float,
    who: str = "this process",
    writer: str = "rank 0",
    what: str | None = None,
    stale_s: float = STALE_S,
    give_up_s: float | None = None,
    clock: Clock | None = None,
    seen: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any] | None:
    """Wait for the writer of `folder` and return the result it announced.

    Args:
        folder: where the writer's claim lies.
        timeout_s: longest wait; 0 = for ever.
        who: this process, for messages.
        writer: the process that is waited for, for messages.
        what: what it makes, for messages.
        stale_s: see the module.
        give_up_s: return None when nobody has answered after so many seconds.
        clock: this process's time.
        seen: called with every new beat of the writer that answered.

    Raises:
        WaitTimeoutError: the result did not come within `timeout_s`; names the file and what was seen.
        InputError, LawError: the writer failed (its own reason and hint), or stopped without a word.
    """
    clock = clock or SystemClock()
    follower = _Follower(folder, writer, stale_s, clock, seen)
    began = told = clock.now()
    named = f"{what} ({follower.path})" if what else str(follower.path)
    try:
        for pause in pauses(follower.me.nonce):
            result = follower.look()
            waited = clock.now() - began
            unanswered = give_up_s if follower.beat is None else None
            if result is not None or (unanswered is not None and waited >= unanswered):
                return result
            doing = _doing(follower.beat or {})
            if timeout_s and waited >= timeout_s:
                raise WaitTimeoutError(
                    f"{who} waited {waited:.2f} s for {named}; last seen of {writer}: {doing}",
                    hint="raise training.packing_wait_timeout_s (0 = for ever)",
                )
            if clock.now() - told >= _TELL_S:
                told = clock.now()
                _log.info("%s waits for %s: %s", who, writer, doing)
            clock.sleep(_pause(pause, waited, timeout_s, unanswered))
    finally:
        follower.leave()
    raise AssertionError("pauses never end")


class _Follower:
    """One look after the other. `beat` is the last beat that answered, or None."""

    def __init__(
        self,
        folder: Path,
        writer: str,
        stale_s: float,
        clock: Clock,
        seen: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:
        self.me = Owner.here()
        self.path = folder / BEAT
        self.beat: dict[str, Any] | None = None
        self._hello = folder / HELLO / self.me.nonce
        self._writer = writer
        self._stale_s = stale_s
        self._watch = Watch(clock)
        self._seen = seen

    def look(self) -> dict[str, Any] | None:
        """The writer's result, when it is there."""
        beat = fresh_json(self.path)
        if beat is not None and beat.get("state") == "released" and "result" not in beat:
            beat = self.beat = None  # an earlier launch has ended
        if beat is not None and self.me.nonce in beat.get("answers", ()):
            if self._seen is not None and (self.beat or {}).get("beat") != beat.get("beat"):
                self._seen(beat)
            self.beat = beat
            if beat.get("state") in ("ready", "released") and "result" in beat:
                return dict(beat["result"])
            if beat.get("state") == "failed":
                raise _failure(self._writer, beat.get("error") or {})
        elif self.beat is None and self.me.nonce not in fresh_names(self._hello.parent):
            files.publish_json(
                self._hello, self.me.to_dict()
            )  # at first, and after an earlier launch tidied up
        if self.beat is not None:
            quiet = self._watch.quiet((self.beat.get("nonce"), self.beat.get("beat")))
            _check_alive(self.beat, quiet, self._stale_s, self._writer, self.path)
        return None

    def leave(self) -> None:
        """Take the hello back."""
        with contextlib.suppress(OSError):
            files.remove(self._hello)


def _pause(pause: float, waited: float, timeout_s: float, give_up_s: float | None) -> float:
    """Not longer than what is left of either limit."""
    left = [pause]
    if timeout_s:
        left.append(timeout_s - waited)
    if give_up_s is not None:
        left.append(give_up_s - waited)
    return max(_LEAST_PAUSE, min(left))


def _check_alive(beat: Mapping[str, Any], quiet: float, stale_s: float, writer: str, path: Path) -> None:
    owner = Owner.of_dict(beat)
    if owner is not None and owner.can_be_looked_up:
        # Its process can be seen: only a dead one has stopped, however long it is silent. Its last word may
        # have come between our look and its end.
        if not owner.is_dead or (fresh_json(path) or {}).get("beat") != beat.get("beat"):
            return
        why = "its process is gone"
    elif quiet < stale_s:
        return
    else:
        why = f"no heartbeat for {quiet:.0f} s"
    raise InputError(
        f"{writer} ({owner}) stopped without a word while {_doing(beat)}: {why}",
        hint="see its own output; starting again goes on where it stopped",
    )


def _failure(writer: str, error: Mapping[str, Any]) -> InputError | LawError:
    """The writer's error as this process's own, with its reason, hint and exit code."""
    kind = LawError if error.get("exit_code") == 1 else InputError
    return kind(f"{writer} failed: {error.get('message', 'no reason given')}", hint=error.get("hint"))
