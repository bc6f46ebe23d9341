"""One process at a time works in an output folder; a second one is told who is there.

The right is a claim (`waiting.claim`) in `<folder>/claim`, gone again when the work ends. It beats with
the work itself (`pulse` after each part), not from a thread, so what is written and in which order
depends on the work alone. A claim that this very process left behind (an interrupted call) is no rival; one
that another of its threads holds is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .. import files
from ..errors import SourceError
from ..waiting.claim import Claim, Owner, look

__all__ = ["PLACE", "alone"]

#: Name of the claim inside the folder.
PLACE = "claim"

_held: set[Path] = set()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Claim]:
    """Hold `folder` for the length of the block.

    Raises:
        InputError: a living process works in it, named with its id and host.
    """
    place, was_there = (folder / PLACE).absolute(), folder.is_dir()
    held = look(place)
    if held is not None and held.owner is not None and _is_here(held.owner) and place not in _held:
        files.remove_tree(place)
    claim = Claim.take(
        place,
        what=str(folder),
        refuse=True,
        threaded=False,
        hint="wait for it, stop it, or choose another output folder",
    )
    _held.add(place)
    try:
        yield claim
    except BaseException as error:
        if not claim.is_out_of_reach(error):
            with contextlib.suppress(OSError, SourceError):  # a full disk: the error says so itself
                claim.release(tidy=True)
        raise
    else:
        claim.release(tidy=True)
    finally:
        _held.discard(place)
        if not was_there and folder.is_dir() and not any(folder.iterdir()):
            files.remove_tree(folder)  # nothing was made


def _is_here(owner: Owner) -> bool:
    me = Owner.here()
    return (owner.machine, owner.pid, owner.started) == (me.machine, me.pid, me.started)
