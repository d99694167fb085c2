"""Links between hosts: sealed, in order, and only with who knows the secret."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
from cryptography.exceptions import InvalidTag
from host_threads import close_links, linked

from dp_core.errors import ConfideError
from dp_core.training import links
from dp_core.training.links import LARGEST_FRAME, LinkBroken, connect


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_links()


def test_frames_arrive_whole_and_in_order_both_ways():
    ours, theirs = linked()
    bodies = [b"", b"a", bytes(range(256)) * 4096, b"last"]
    for sending, receiving in ((ours, theirs), (theirs, ours)):
        thread = threading.Thread(
            target=lambda s=sending: [s.send(i, b) for i, b in enumerate(bodies)]
        )
        thread.start()
        assert [receiving.receive() for _ in bodies] == list(enumerate(bodies))
        thread.join()


def test_who_does_not_know_the_secret_is_no_host():
    with pytest.raises(LinkBroken, match=r"not what a host of this training sent|is gone"):
        linked(b"a" * 32, b"b" * 32)


def test_a_short_secret_is_refused():
    with pytest.raises(ConfideError, match="fewer than 32 bytes"):
        linked(b"short", b"short")


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


class Overheard:
    """A connection whose bytes can be looked at, and changed, on the way."""

    def __init__(self) -> None:
        self.ours, near = socket.socketpair()
        far, self.theirs = socket.socketpair()
        self._sockets = (self.ours, near, far, self.theirs)
        self.bytes = bytearray()
        self.change = lambda data: data
        self.threads = []
        for source, sink, kept in ((near, far, True), (far, near, False)):
            carrying = threading.Thread(target=self._carry, args=(source, sink, kept))
            self.threads.append(carrying)
            carrying.start()

    def _carry(self, source: socket.socket, sink: socket.socket, kept: bool) -> None:
        while data := _received(source):
            if kept:
                self.bytes += data
                data = self.change(data)
            sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


def through(line: Overheard):
    ends, told = {}, [{"host": 0}, {"host": 1}]

    def one(number, connection):
        ends[number] = connect(
            connection, b"s" * 32, called=number == 0, tell=told[number], expect=told[1 - number],
            patience=10.0,
        )  # fmt: skip

    threads = [
        threading.Thread(target=one, args=pair) for pair in ((0, line.ours), (1, line.theirs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return ends[0], ends[1]


@pytest.fixture
def line():
    made = Overheard()
    yield made
    for connection in (made.ours, made.theirs):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for thread in made.threads:
        thread.join(5)
    made.close()


def test_what_is_sent_is_not_on_the_wire_and_never_looks_the_same_twice(line):
    ours, theirs = through(line)
    body, before = b"the sum over patients, without noise", len(line.bytes)
    for _ in range(2):
        ours.send(5, body)
        assert theirs.receive() == (5, body)
    wire = bytes(line.bytes[before:])
    assert body not in wire
    assert wire[: len(wire) // 2] != wire[len(wire) // 2 :]


def test_each_direction_has_a_key_of_its_own():
    """What comes back to who sent it is not taken for an answer."""
    ours, theirs = linked()
    sealed = ours._sealing.encrypt(bytes(12), b"sums", b"header")
    assert ours._sealing.encrypt(bytes(12), b"sums", b"header") == sealed
    assert theirs._sealing.encrypt(bytes(12), b"sums", b"header") != sealed
    with pytest.raises(InvalidTag):
        ours._opening.decrypt(bytes(12), sealed, b"header")
    assert theirs._opening.decrypt(bytes(12), sealed, b"header") == b"sums"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),  # altered
        lambda data: data[:4] + bytes([data[4] ^ 1]) + data[5:],  # of another kind
        lambda data: data + data,  # sent again
        lambda data: b"\xff\xff\xff\xff" + data[4:],  # of another length
    ],
    ids=["altered", "kind", "repeated", "length"],
)
def test_whatever_is_changed_on_the_way_is_refused(line, change):
    ours, theirs = through(line)
    line.change = change
    ours.send(5, b"sums")
    with pytest.raises(LinkBroken, match="not what a host of this training sent"):
        theirs.receive()
        theirs.receive()


def test_another_host_than_expected_is_refused():
    ends = socket.socketpair()

    def call():
        told = {"tell": {"host": 2}, "expect": {"host": 0}}
        with contextlib.suppress(LinkBroken):
            connect(ends[1], b"s" * 32, called=False, patience=5, **told).close()

    thread = threading.Thread(target=call)
    thread.start()
    told = {"tell": {"host": 0}, "expect": {"host": 1}}
    try:
        with pytest.raises(LinkBroken, match="another host"):
            connect(ends[0], b"s" * 32, called=True, patience=5, **told).close()
    finally:
        thread.join(10)


def test_a_silent_stranger_is_waited_for_as_long_as_one_was_told():
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(LinkBroken, match="does not answer"):
        connect(ours, b"s" * 32, called=True, tell={}, expect={}, patience=0.1)


def test_the_end_of_the_other_host_is_noticed_by_who_waits_and_by_who_sends():
    ours, theirs = linked()
    theirs.close()
    with pytest.raises(LinkBroken, match="is gone"):
        ours.receive()
    with pytest.raises(LinkBroken, match="is gone"):
        ours.send(1, bytes(LARGEST_FRAME))


def test_a_machine_that_vanishes_without_a_word_is_noticed_within_seconds():
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_connection(door.getsockname()) as connection,
    ):
        links._watch(connection)
        option = connection.getsockopt
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, probes = (
            option(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * probes <= 15
        assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 15_000
