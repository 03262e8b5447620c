"""Who asks whether it can be reached makes others dial nobody else, and hears nothing that they cannot know."""

from __future__ import annotations

import ipaddress

import pytest
from pydantic import ValidationError

from opendiloco.dialback import Place, Question, judge

GLOBAL, OTHER, V6 = "198.41.0.4", "193.0.14.129", "2001:500:2f::f"
ROUTER, HOME, METADATA = "10.0.0.1", "192.168.1.7", "169.254.169.254"


def place(host: str, port: int = 4001) -> Place:
    return Place.model_validate({"host": host, "port": port})


@pytest.mark.parametrize(
    ("seen_at", "announced", "tried", "left_out"),
    [
        (GLOBAL, [GLOBAL, HOME, "127.0.0.1"], [GLOBAL], []),
        (GLOBAL, [HOME, "172.17.0.2"], [], []),  # behind a router: nobody gets there
        (GLOBAL, [OTHER], [], [OTHER]),  # it may go out another way than others come in
        (GLOBAL, [f"::ffff:{GLOBAL}", V6], [GLOBAL], [V6]),
        (V6, [V6, GLOBAL], [V6], [GLOBAL]),
        (ROUTER, [HOME, "10.1.2.3", OTHER], [HOME, "10.1.2.3"], [OTHER]),  # within a private network
        ("127.0.0.1", ["127.0.0.3", HOME], ["127.0.0.3", HOME], []),  # on this machine
        (None, [GLOBAL, HOME], [], [GLOBAL, HOME]),  # through a relay
        *(
            (seen_at, [host], [], [])
            for seen_at in (GLOBAL, ROUTER)
            for host in ("127.0.0.1", "127.1.2.3", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", METADATA, "fe80::1")
        ),
        (GLOBAL, ["10.0.0.1", "100.64.0.1", "fc00::1", "255.255.255.255"], [], []),
    ],
)
def test_a_peer_dials_what_is_the_askers_own_as_far_as_it_can_tell(
    seen_at: str | None, announced: list[str], tried: list[str], left_out: list[str]
) -> None:
    judged = judge(map(place, announced), {None}, ipaddress.ip_address(seen_at) if seen_at else None)
    assert [str(one.host) for one in judged.tried] == tried
    assert [str(one.host) for one in judged.left_out] == left_out


def test_a_peer_does_not_take_itself_for_the_asker() -> None:
    """Containers of two machines have the same address and, with the same profile, the same port."""
    announced, bridge = [place("172.17.0.2"), place("172.17.0.2", 4002)], ipaddress.ip_address("172.17.0.1")
    judged = judge(announced, {place("172.17.0.2")}, bridge)
    assert (judged.tried, judged.left_out) == ([place("172.17.0.2", 4002)], [place("172.17.0.2")])


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST", "127.1", "2130706433", "0x7f000001", "a..b", "x" * 64, "", "::1%lo/x", "1.2.3.4/8"],
)
def test_a_place_has_an_address_and_no_name(host: str) -> None:
    with pytest.raises(ValidationError):
        Question.model_validate_json(f'{{"places": [{{"host": "{host}", "port": 22}}]}}')


@pytest.mark.parametrize("places", ["[]", '[{"host": "1.2.3.4", "port": 0}]', '[{"host": "1.2.3.4", "port": 65536}]'])
def test_a_question_has_places_with_ports(places: str) -> None:
    with pytest.raises(ValidationError):
        Question.model_validate_json(f'{{"places": {places}}}')


def test_a_question_has_few_places() -> None:
    places = ",".join(['{"host": "1.2.3.4", "port": 1}'] * 5)
    with pytest.raises(ValidationError):
        Question.model_validate_json(f'{{"places": [{places}]}}')
