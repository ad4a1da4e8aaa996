"""Errors that say whose fault it is.

| error         | whose                                | what the caller does                  |
|---------------|--------------------------------------|---------------------------------------|
| `ConfigError` | yours: a value in the configuration  | change it; the message names the line |
| `Refused`     | nobody's: full, or closing           | do without, or try again later        |
| `TierBroken`  | outside: a disk, a server, a process | go on without that tier               |
| `Closed`      | yours: used after its close          | stop using it                         |
| `CoreBug`     | ours                                 | report it; kvtier has switched off    |

A miss is a value, never an error. Messages name the value, the limit and what to do.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of every error that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """The configuration cannot work as written; the message says what to change."""


class Refused(KVTierError):
    """There is no room, or a close has begun. Nothing was started."""


class TierBroken(KVTierError):
    """Something outside of kvtier failed: a file system, a server, a child process."""


class Closed(KVTierError):
    """The object was closed before this call."""


class CoreBug(KVTierError):
    """A rule that kvtier itself must keep was broken. The engine goes on without kvtier."""
