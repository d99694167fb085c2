import socket
import ssl
import threading
from pathlib import Path

import pytest

from dp_core.cluster import node
from dp_core.errors import BadInput


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    node.make_secrets(tmp_path / "secrets")
    return tmp_path / "secrets"


def member(secrets: Path, folder: Path, address: str = "127.0.0.1") -> dict[str, str]:
    folder.mkdir(parents=True)
    return node.member_environment(secrets, folder, address)


def test_secrets_are_readable_only_by_their_owner(secrets, tmp_path):
    variables = member(secrets, tmp_path / "member")
    files = [*secrets.iterdir(), *(tmp_path / "member").iterdir()]
    assert len(files) == 5
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert len((secrets / node.TOKEN).read_text()) == 64
    assert (secrets / node.TOKEN).read_text() not in "".join(variables.values())


def test_existing_secrets_are_not_overwritten(secrets):
    before = {file.name: file.read_bytes() for file in secrets.iterdir()}
    node.make_secrets(secrets)
    assert before == {file.name: file.read_bytes() for file in secrets.iterdir()}


def test_address_without_secrets_is_refused(secrets):
    with pytest.raises(BadInput, match="without token and TLS"):
        node.require_secrets(None, "CONFIDE_CLUSTER")
    assert node.require_secrets(secrets, "CONFIDE_CLUSTER") == secrets
    for name in (node.TOKEN, node.AUTHORITY):
        (secrets / name).rename(secrets / "away")
        with pytest.raises(BadInput, match=f"{name} cannot be read"):
            node.require_secrets(secrets, "CONFIDE_CLUSTER")
        (secrets / "away").rename(secrets / name)


def handshake(server: dict[str, str], client: dict[str, str], name: str) -> str:
    """Return the TLS version that two members agree on, each verifying the other."""
    answering = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    calling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    answering.verify_mode = ssl.CERT_REQUIRED
    for context, variables in ((answering, server), (calling, client)):
        context.load_cert_chain(variables["RAY_TLS_SERVER_CERT"], variables["RAY_TLS_SERVER_KEY"])
        context.load_verify_locations(variables["RAY_TLS_CA_CERT"])
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)

    def answer() -> None:
        try:
            with answering.wrap_socket(theirs, server_side=True) as link:
                link.sendall(b"x")
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with calling.wrap_socket(ours, server_hostname=name) as link:
            if link.recv(1) != b"x":
                raise ssl.SSLError("closed")
            return str(link.version())
    finally:
        ours.close()
        thread.join()


def test_members_of_one_cluster_accept_each_other_at_their_addresses(secrets, tmp_path):
    one, two = member(secrets, tmp_path / "1", "10.1.2.3"), member(secrets, tmp_path / "2")
    assert handshake(one, two, "10.1.2.3") == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        handshake(one, two, "10.1.2.4")


def test_member_of_another_cluster_is_refused(secrets, tmp_path):
    node.make_secrets(tmp_path / "others")
    ours, theirs = member(secrets, tmp_path / "1"), member(tmp_path / "others", tmp_path / "2")
    for server, client in ((ours, theirs), (theirs, ours)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            handshake(server, client, "127.0.0.1")
