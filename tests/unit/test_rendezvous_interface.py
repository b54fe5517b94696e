"""The advertised address on a simulated host."""

import socket

import pytest

from shoal.errors import UsageError
from shoal.rendezvous import interface
from shoal.rendezvous.interface import Interface, choose_address, choose_addresses

HOST = [
    Interface("lo", ("127.0.0.1", "::1"), is_loopback=True),
    Interface("eth1", ("10.1.0.5", "fe80::1", "fd00::5")),
    Interface("eth10", ("10.10.0.5",)),
    Interface("docker0", ("172.17.0.1",)),
    Interface("ib0", ("fe80::2",)),
    Interface("old0", ("192.168.9.9",), is_up=False),
]
ROUTES = {
    "head": "10.10.0.5",
    "me": "127.0.1.1",
    "localhost": "127.0.0.1",
    "::1": "::1",
    "127.0.0.1": "127.0.0.1",
    "192.0.2.1": "10.1.0.5",
    "fd00::1": "fd00::5",
}


@pytest.fixture(autouse=True)
def _made_up_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "list_interfaces", lambda: HOST)
    monkeypatch.setattr(interface, "_source_towards", ROUTES.__getitem__)
    monkeypatch.setattr(interface, "_routes", {})


NAMED = {"eth1": "10.1.0.5", "eth": "10.1.0.5", "=eth10": "10.10.0.5", "docker,eth": "172.17.0.1"}
# An exclusion selects the first external interface that is up.
NAMED |= {"lo": "127.0.0.1", "^docker": "10.1.0.5", "^=eth1": "10.10.0.5"}


def test_settings_or_routes_set_addresses() -> None:
    for master, settings, address in (
        # Interfaces are named as for NCCL.
        *(("head", f"SHOAL_SOCKET_IFNAME={wanted}", address) for wanted, address in NAMED.items()),
        # shoal's variable precedes Gloo's, and Gloo's precedes NCCL's.
        ("head", "NCCL_SOCKET_IFNAME=lo", "127.0.0.1"),
        ("head", "NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=docker0", "172.17.0.1"),
        ("head", "GLOO_SOCKET_IFNAME=docker0 SHOAL_SOCKET_IFNAME=eth10", "10.10.0.5"),
        # A list for other libraries may name interfaces of other hosts.
        ("head", "GLOO_SOCKET_IFNAME=wlan,docker", "172.17.0.1"),
        ("head", "NCCL_SOCKET_IFNAME=wlan,docker", "172.17.0.1"),
        # The address has the master's family, and is never link-local.
        ("fd00::1", "SHOAL_SOCKET_IFNAME=eth1", "fd00::5"),
        # Without a variable the route to the master decides.
        *((name, "", ROUTES[name]) for name in ("head", "127.0.0.1", "localhost", "::1")),
        ("me", "", "10.1.0.5"),  # /etc/hosts maps this name to 127.0.1.1, useless for other hosts
        (None, "", "10.1.0.5"),
    ):
        environ = dict(setting.split("=", 1) for setting in settings.split())
        assert choose_address(master, environ).address == address


def test_the_route_to_a_master_whose_name_has_vanished_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(host: str) -> str:
        raise UsageError(f"{host} does not resolve")

    assert choose_address("head", {}).address == "10.10.0.5"
    monkeypatch.setattr(interface, "_source_towards", fail)
    assert choose_address("head", {}).address == "10.10.0.5"
    with pytest.raises(UsageError):
        choose_address("other", {})
    monkeypatch.setattr(interface, "list_interfaces", lambda: HOST[:2])  # that address has gone
    with pytest.raises(UsageError):
        choose_address("head", {})


def test_paths_take_turns_over_the_named_interfaces() -> None:
    def names(n_paths: int, wanted: str) -> list[str]:
        environ = {"SHOAL_SOCKET_IFNAME": wanted}
        return [one.interface for one in choose_addresses(n_paths, "head", environ)]

    assert names(3, "eth10,docker0") == ["eth10", "docker0", "eth10"]
    assert names(2, "eth1") == ["eth1", "eth1"]  # and not eth10
    assert names(2, "eth") == ["eth1", "eth10"]
    assert [one.address for one in choose_addresses(2, "head", {})] == 2 * ["10.10.0.5"]


def test_unusable_interfaces_are_refused_with_a_list_of_usable_ones() -> None:
    for setting, why in (
        *((f"GLOO_SOCKET_IFNAME={name}", "") for name in ("wlan0", "=eth", "ib0", "^docker,eth")),
        ("SHOAL_SOCKET_IFNAME=eth1,eht10", "matches eht10"),
        ("SHOAL_SOCKET_IFNAME=wlan, docker,", "matches wlan"),
        ("SHOAL_SOCKET_IFNAME==eth1,eth", "matches eth"),
        ("SHOAL_SOCKET_IFNAME=eht0,eth1,ib0", "matches eht0 or ib0"),
        ("SHOAL_SOCKET_IFNAME==wlan0,ib0", "matches wlan0 or ib0"),
    ):
        name, _, wanted = setting.partition("=")
        with pytest.raises(UsageError) as caught:
            choose_address("head", {name: wanted})
        text = str(caught.value)
        assert text.startswith(f"{setting}: no network interface")
        assert f"{why}; this host has lo" in text
        assert "eth1 (10.1.0.5, fe80::1, fd00::5)" in text


def test_without_master_and_route_no_address_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_source_towards", lambda _: "127.0.0.1")
    with pytest.raises(UsageError, match=r"SHOAL_SOCKET_IFNAME to one of lo \(127.0.0.1, ::1\)"):
        choose_address(None, {})


def test_without_a_route_the_only_interface_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lo, eth1, *_, old0 = HOST
    monkeypatch.setattr(interface, "_source_towards", lambda _: "127.0.1.1")
    monkeypatch.setattr(interface, "list_interfaces", lambda: [lo, eth1, old0])
    assert choose_address("me", {}) == ("10.1.0.5", "eth1", "the only interface")


def test_the_kernel_lists_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    loopback = next(one for one in interface.list_interfaces() if one.is_loopback)
    assert "127.0.0.1" in loopback.addresses
    assert loopback.is_up
    assert loopback.name in {name for _, name in socket.if_nameindex()}


def test_a_master_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"MASTER_ADDR=no\.such\.host\.invalid does not resolve"):
        choose_address("no.such.host.invalid", {})
