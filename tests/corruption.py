"""Corruption of files: truncation, random bytes, splices, and JSON with wrong values."""

import json
import random
from typing import Any

_STRANGE = (
    None,
    True,
    -1,
    0,
    1.5,
    10**15,
    "",
    "zyxother",
    [],
    {},
    [[]],
    {"a": 1},
    "\ud800",
    "1\n2",
)

_MARKS = (b'"', b"\0", b"\n", b"\r", b"{", b"\\", b"\xef\xbb\xbf", b"\xff", b"\t", b"|", b":")


def corrupted(data: bytes, rng: random.Random) -> bytes:
    """Return the data after one to three random corruptions."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1)
        before, after = data[:place], data[place:]
        noise = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        mark = rng.choice(_MARKS)
        data = rng.choice(
            (
                before,
                b"",
                before + noise + after,
                before + noise + after[len(noise) :],
                before + mark + after,
                before + after[rng.randint(1, 40) :],
                before + after[:200] * 3 + after,
            )
        )
    return data


def misshapen(data: bytes, rng: random.Random) -> bytes:
    """Return well-formed JSON in which one value, key or level is wrong."""
    body = json.loads(data)
    places = list(_places(body))
    if not places or rng.random() < 0.1:
        return json.dumps(rng.choice(_STRANGE)).encode()
    holder, key = rng.choice(places)
    match rng.randrange(3):
        case 0:
            holder[key] = rng.choice(_STRANGE)
        case 1:
            del holder[key]
        case _ if isinstance(holder, dict):
            holder["zyxunknown"] = holder.pop(key)
        case _:
            holder.insert(0, rng.choice(_STRANGE))
    return json.dumps(body).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = (
        value.keys()
        if isinstance(value, dict)
        else range(len(value) if isinstance(value, list) else 0)
    )
    places = [(value, key) for key in keys]
    for key in list(keys):
        places += _places(value[key])
    return places
