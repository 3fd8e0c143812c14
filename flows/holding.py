"""The right to write in a run: whatever commits in one does so inside :func:`hold_run`.

Readers hold nothing. Inside, the same run may be opened and held again, by the flow that a command
started: it is the same lease. Another thread is another writer.
"""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

from artifacts.lease import Lease, Record, hold
from artifacts.store import Store
from flows.config import Config, UserError
from flows.session import Session

log = logging.getLogger("ratchet")

_HELD: ContextVar[Lease | None] = ContextVar("_HELD", default=None)


@contextlib.contextmanager
def hold_run(store: Store, config: Config) -> Iterator[None]:
    """Keep other writers out of the run while inside.

    Raises:
        HeldError: another process writes in it.
        UserError: the store can't be written, or can't keep a second writer out.
    """
    outer = _HELD.get()
    if outer is not None and outer.store.url == store.url:
        with outer.guarding(store):
            yield
        return
    with contextlib.ExitStack() as held:
        try:
            check_store(store, config)
            lease = held.enter_context(hold(store, config.lease.ttl_seconds, _say_who))
        except OSError as error:
            raise cannot_write(config, error) from error
        mark = _HELD.set(lease)
        held.callback(_HELD.reset, mark)
        yield


def hold_unless_complete(session: Session) -> contextlib.AbstractContextManager[None]:
    """Hold the session's run, or nothing where nothing is left to write in it."""
    if session.is_complete():
        return contextlib.nullcontext()
    return hold_run(session.store, session.config)


def check_store(store: Store, config: Config) -> None:
    """Refuse a store that overwrites where exclusive creation is asked for.

    Nothing keeps two writers apart there, so the user has to say that there is one.
    """
    if config.lease.single_writer or store.is_local or store.is_exclusive():
        return
    raise UserError(
        f"store {config.store!r} overwrites where exclusive creation is asked for, so that a "
        "second writer would not be kept out: use one that honours If-None-Match, or set "
        "lease.single_writer=true and see to it yourself"
    )


def cannot_write(config: Config, error: OSError) -> UserError:
    """The sentence for a store that refuses to be written."""
    return UserError(f"store {config.store!r} can't be written: {error}")


def _say_who(holder: Record) -> None:
    log.info(
        "lease    process %d on %s held the run last: waiting up to %g s for it to show that it "
        "lives",
        holder.process.pid,
        holder.host,
        holder.ttl_seconds,
    )
