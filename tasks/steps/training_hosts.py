"""The hosts of a training: processes beside the step, or of other machines.

`CONFIDE_HOSTS=4` alone: the step is the first of four hosts, and starts the others on this machine,
each a process at the other end of a socket pair, which has no address. They end with the step.

On several machines a launcher starts this module on each of them:

`CONFIDE_HELPER`        number of this helper, from 0: it is host 1 of the chain, behind the step
`CONFIDE_HOSTS_AT`      `NAME:PORT NAME-{}:PORT`: the step, and the helpers by number
`CONFIDE_HOSTS_SECRET`  what all of them know, 32 characters or more; links are encrypted under it

A helper is given the store, and nothing else: no ledger, no seed, no MLflow.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dp_core.data.token_store import TokenStore, joined
from dp_core.errors import BadInput, ConfideError, fault_line
from dp_core.training.hosts import Helper, Hosts, help_train
from dp_core.training.links import LEAST_SECRET, Link, LinkBroken, connect
from tasks.protocol.least_privilege import HELPER, HOSTS, HOSTS_AT, HOSTS_SECRET, for_helpers
from tasks.runtime.context import StepContext
from tasks.runtime.deployment import CHECKOUT, Deployment
from tasks.runtime.log import configure, log
from tasks.steps.token_store import AUDIT, TRAIN
from tasks.storage import Store, is_remote, local_path

_LINKS = "CONFIDE_HOST_LINKS"  # descriptors of the links that a process was started with
_STARTING = 1800.0  # seconds until the other hosts are there: machines may have to be made first
_ANSWERING = 10.0  # seconds that who calls has to say who it is
_AGAIN = 0.5  # seconds between calls of a host that is not there yet


@contextmanager
def other_hosts(
    context: StepContext, store_uri: str, canaries: Sequence[int] = ()
) -> Iterator[Hosts | None]:
    """Give a training its other hosts; None where this is the only one.

    Args:
        context: of the step.
        store_uri: output folder of the token store whose units train.
        canaries: numbers of the audit canaries that are in.

    Raises:
        ConfideError: the other hosts are not there in time.
    """
    deployment = context.deployment
    if deployment.hosts == 1:
        yield None
        return
    rows = {"uri": store_uri, "canaries": list(canaries), "scratch": str(context.durable)}
    begin = _called if deployment.hosts_at else _started
    with begin(deployment) as link:
        hosts = Hosts(deployment.hosts, link, rows)
        log(f"{context.run.task}: training on {deployment.hosts} hosts")
        try:
            yield hosts
        finally:
            hosts.end()


@contextmanager
def _started(deployment: Deployment) -> Iterator[Link]:
    """Start the helpers as processes of this machine; they end with the context."""
    count, secret = deployment.hosts, secrets.token_hex(LEAST_SECRET)
    pairs = [socket.socketpair() for _ in range(count - 1)]
    ours = pairs[0][0]
    shared = for_helpers(os.environ)
    # Their threads would otherwise stand in each other's way.
    shared.setdefault("TF_NUM_INTRAOP_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    processes = []
    try:
        for number in range(1, count):
            ends = [pairs[number - 1][1]] + ([pairs[number][0]] if number < count - 1 else [])
            links = [end.fileno() for end in ends]
            told = {
                HELPER: str(number - 1),
                HOSTS_SECRET: secret,
                _LINKS: " ".join(map(str, links)),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tasks.steps.training_hosts"],
                    cwd=CHECKOUT,
                    env=shared | told | {HOSTS: str(count)},
                    pass_fds=links,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),  # ours is for messages
                )
            )
        for end in (end for pair in pairs for end in pair if end is not ours):
            end.close()
        yield _link(ours, secret.encode(), deployment, 0, called=True, patience=_STARTING)
    finally:
        ours.close()
        for process in processes:  # they keep nothing
            process.kill()
        for process in processes:
            process.wait()


@contextmanager
def _called(deployment: Deployment) -> Iterator[Link]:
    """Wait for host 1, of another machine, to call."""
    with _listening(deployment, 0) as door:
        link = _answered(door, deployment, 0)
    try:
        yield link
    finally:
        link.close()


def main() -> int:
    """Help a training as the host that the environment says; return the exit code."""
    os.umask(0o077)  # everything here is private text
    try:
        configure("pretrain")
        deployment = Deployment.from_environment()
        deployment.prepare()
        number = _number(deployment)
        with _helper(deployment, number) as helper:
            help_train(helper, lambda rows: _open(rows, deployment, number))
    except ConfideError as error:
        log(f"confide: helper {os.environ.get(HELPER)}: {error}", "error")
        return error.exit_code
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - as `tasks.runtime.step.main`
        log(f"confide: helper {os.environ.get(HELPER)}: {fault_line(error)}", "error")
        return 1
    return 0


def _open(rows: Mapping[str, Any], deployment: Deployment, number: int) -> TokenStore:
    """Open the rows that the chief trains on.

    Of a local store nothing is read here but where rows begin: what we train on is compared with
    what the chief has, by digest.
    """
    store = Store(deployment.store, deployment.cache)
    uri = store.location(rows["uri"])  # refuses a folder outside this deployment's store
    folder = store.local_copy(uri) if is_remote(uri) else local_path(uri)
    train = TokenStore.open(folder / TRAIN)
    if not rows["canaries"]:
        return train
    scratch = Path(rows["scratch"]) / f"rows-of-host-{number}"  # goes with the unfinished step
    return joined(scratch, train, TokenStore.open(folder / AUDIT), rows["canaries"])


def _number(deployment: Deployment) -> int:
    """Return the number of this host: 0 is the step."""
    text = os.environ.get(HELPER, "")
    if not (text.isascii() and text.isdigit() and int(text) < deployment.hosts - 1):
        raise BadInput(
            f"{text!r} is not the number of a helper",
            where=HELPER,
            fix=f"Number them from 0; there is one less than {HOSTS}.",
        )
    return int(text) + 1


@contextmanager
def _helper(deployment: Deployment, number: int) -> Iterator[Helper]:
    """Link this host to the one before it and, unless it is the last, to the one behind it."""
    last = number == deployment.hosts - 1
    if given := os.environ.pop(_LINKS, ""):
        secret = _secret()
        ends = [socket.socket(fileno=int(word)) for word in given.split()]
        links = [
            _link(end, secret, deployment, number, called=called, patience=_STARTING)
            for end, called in zip(ends, (False, True), strict=False)
        ]
        yield Helper(number, deployment.hosts, links[0], None if last else links[1])
        return
    with _listening(deployment, number) as door:
        before = _call(deployment, number)
        behind = None if last else _answered(door, deployment, number)
    yield Helper(number, deployment.hosts, before, behind)


def _link(
    connection: socket.socket,
    secret: bytes,
    deployment: Deployment,
    number: int,
    *,
    called: bool,
    patience: float,
) -> Link:
    """Make a connection to the host before (we called) or behind (it called) a link."""
    other = number + 1 if called else number - 1
    return connect(
        connection,
        secret,
        called=called,
        tell={"host": number, "hosts": deployment.hosts},
        expect={"host": other, "hosts": deployment.hosts},
        patience=patience,
    )


def _secret() -> bytes:
    secret = os.environ.get(HOSTS_SECRET, "").encode()
    if len(secret) < LEAST_SECRET:
        raise BadInput(
            f"hosts on several machines need a secret of {LEAST_SECRET} characters or more",
            where=HOSTS_SECRET,
            fix="Give all of them the same: openssl rand -hex 32",
        )
    return secret


def _address(deployment: Deployment, number: int) -> tuple[str, int]:
    step, helpers = deployment.hosts_at.split()
    name, _, port = (helpers.replace("{}", str(number - 1)) if number else step).rpartition(":")
    return name, int(port)


@contextmanager
def _listening(deployment: Deployment, number: int) -> Iterator[socket.socket]:
    """Open this host's door to the one behind it."""
    _, port = _address(deployment, number)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        door = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfideError(f"port {port} cannot be opened ({reason})", where=HOSTS_AT) from None
    with door:
        yield door


def _answered(door: socket.socket, deployment: Deployment, number: int) -> Link:
    """Wait for the host behind us to call; whoever else calls is not answered."""
    secret, until = _secret(), time.monotonic() + _STARTING
    while (left := until - time.monotonic()) > 0:
        door.settimeout(left)
        try:
            connection, _ = door.accept()
        except TimeoutError:
            break
        try:
            return _link(connection, secret, deployment, number, called=True, patience=_ANSWERING)
        except LinkBroken as error:
            log(f"host {number}: a call that was none: {error.what}", "warning")
    raise ConfideError(f"host {number + 1} did not call in time", where=HOSTS_AT)


def _call(deployment: Deployment, number: int) -> Link:
    """Call the host before us until it answers: it may not be there yet."""
    secret, until = _secret(), time.monotonic() + _STARTING
    address = _address(deployment, number - 1)
    while True:
        try:
            connection = socket.create_connection(address, timeout=_ANSWERING)
            return _link(connection, secret, deployment, number, called=False, patience=_ANSWERING)
        except (OSError, LinkBroken):
            if time.monotonic() > until:
                raise ConfideError(
                    f"host {number - 1} is not there", where=f"{address[0]}:{address[1]}"
                ) from None
            time.sleep(_AGAIN)


if __name__ == "__main__":
    sys.exit(main())
