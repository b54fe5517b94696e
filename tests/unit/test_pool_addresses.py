"""`SHOAL_SERVERS`, and the options of `shoal server`."""

import pytest

from shoal.errors import UsageError
from shoal.group.pool import addresses
from shoal.group.pool.addresses import Address, JobEndpoint, endpoint_from, n_required_from
from shoal.group.pool.served_group import ServedGroup
from shoal.plan import Settings
from shoal.server.options import listen


def test_an_address_may_have_a_port() -> None:
    read = {
        "cpu1": ("cpu1", 7077),
        "cpu1:80": ("cpu1", 80),
        "10.0.0.1:80": ("10.0.0.1", 80),
        "fd00::1": ("fd00::1", 7077),
        "[fd00::1]": ("fd00::1", 7077),
    }
    for text, (host, port) in (read | {"[fd00::1]:80": ("fd00::1", 80)}).items():
        address = addresses.parse_address(text, "it")
        assert address == Address(host, port)
        assert addresses.parse_address(str(address), "it") == address


@pytest.mark.parametrize("text", ["", ":80", "a:b", "a:80:90", "a:99999", "[a", "a]:1", "[]:1"])
def test_an_invalid_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"^SHOAL_SERVERS: "):
        addresses.parse_address(text, "SHOAL_SERVERS")


def test_duplicates_are_removed_from_a_list_of_servers() -> None:
    assert addresses.servers_from({}) == ()
    named = {"SHOAL_SERVERS": "cpu1, cpu2:7000,"}
    assert addresses.servers_from(named) == (Address("cpu1", 7077), Address("cpu2", 7000))
    with pytest.raises(UsageError, match="names cpu1:7077 twice: name each"):
        addresses.servers_from({"SHOAL_SERVERS": "cpu1,cpu2,cpu1:7077"})
    with pytest.raises(UsageError, match="no port from 1"):
        addresses.servers_from({"SHOAL_SERVERS": "cpu1:0"})


@pytest.mark.parametrize("text", ["3", "-1", "x", "1.0"])
def test_no_more_servers_can_be_required_than_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=f"SHOAL_SERVERS_REQUIRED='{text}' is not a number from 0"):
        n_required_from({"SHOAL_SERVERS": "a,b", "SHOAL_SERVERS_REQUIRED": text})
    assert n_required_from({"SHOAL_SERVERS": "a,b", "SHOAL_SERVERS_REQUIRED": "2"}) == 2


def test_a_server_listens_on_an_interface_or_at_an_address() -> None:
    for where in ("lo", "127.0.0.1", "localhost"):
        listeners = listen(where, 0)
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == 1
        with pytest.raises(UsageError, match=r"Address already in use.*ss -ltnp"):
            listen(f"127.0.0.1:{ports.pop()}")
        for listener in listeners:
            listener.close()


def test_an_address_of_another_host_is_refused_with_the_local_ones() -> None:
    with pytest.raises(UsageError, match=r"Cannot assign.*lo \(127\.0\.0\.1"):
        listen("198.51.100.1", 0)
    with pytest.raises(UsageError, match=r"an interface of this host, and does not resolve.*lo \("):
        listen("no-such-name.invalid", 0)


def test_servers_without_a_job_key_are_refused() -> None:
    with pytest.raises(UsageError, match="SHOAL_SERVERS is set but SHOAL_KEY_FILE is not"):
        ServedGroup.check({"SHOAL_SERVERS": "cpu1"})
    ServedGroup.check({"SHOAL_SERVERS": "cpu1", "SHOAL_KEY": "k" * 32})


def test_the_store_of_servers_needs_a_port_and_a_job() -> None:
    named = {"SHOAL_SERVERS": "cpu1, rdzv://host0:29400/job1 ,rdzv"}
    assert endpoint_from(named) == JobEndpoint("host0", 29400, "job1")
    assert addresses.servers_from(named) == (Address("cpu1", 7077), Address("rdzv", 7077))
    assert endpoint_from({"SHOAL_SERVERS": "rdzv://[fd00::1]:1"}) == ("fd00::1", 1, "none")
    assert endpoint_from({"SHOAL_SERVERS": "cpu1"}) is None
    assert n_required_from({"SHOAL_SERVERS": "rdzv://a:1", "SHOAL_SERVERS_REQUIRED": "7"}) == 7
    with pytest.raises(UsageError, match="names no store: write rdzv://HOST:PORT/ID"):
        endpoint_from({"SHOAL_SERVERS": "rdzv://"})
    for wrong in ("host0", "host0:0", ":1", "a:1/a b", "a:99999"):
        with pytest.raises(UsageError, match=r"^SHOAL_SERVERS: "):
            endpoint_from({"SHOAL_SERVERS": f"rdzv://{wrong}"})
    with pytest.raises(UsageError, match="names 2 stores"):
        endpoint_from({"SHOAL_SERVERS": "rdzv://a:1,rdzv://b:1"})


@pytest.mark.parametrize("named", [{}, {"SHOAL_SERVERS": ""}, {"SHOAL_SERVERS": " , "}])
def test_required_servers_must_be_named(named: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="SHOAL_SERVERS_REQUIRED='1', but SHOAL_SERVERS names no"):
        Settings.read({**named, "SHOAL_SERVERS_REQUIRED": "1"})
    assert Settings.read({**named, "SHOAL_SERVERS_REQUIRED": "0"}).servers == ""


def test_both_variables_are_compared_between_workers_without_spaces() -> None:
    assert Settings.read({}).servers == ""
    one = Settings.read({"SHOAL_SERVERS": "cpu1, cpu2"}).servers
    assert one == Settings.read({"SHOAL_SERVERS": "cpu1,cpu2"}).servers
    assert one != Settings.read({"SHOAL_SERVERS": "cpu2,cpu1"}).servers
    required = {"SHOAL_SERVERS": "cpu1,cpu2", "SHOAL_SERVERS_REQUIRED": "1"}
    assert one != Settings.read(required).servers
