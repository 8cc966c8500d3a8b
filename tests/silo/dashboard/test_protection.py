"""Which requests the dashboard refuses because of other sites."""

import pytest

from headrace.silo.dashboard.protection import HEADERS, is_from_own_page, names_this_machine

OWN = {"host": "localhost:9464", "x-headrace": "1", "content-type": "application/json"}


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9464", "127.0.0.1:9464", "127.1.2.3", "[::1]:9464", "a.localhost"]
)
def test_names_of_this_machine(host: str):
    assert names_this_machine(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example:9464", "10.0.0.7", "[::1", "127.0.0.1.evil"]
)
def test_a_name_that_another_site_points_here_is_no_name_of_this_machine(host: str):
    assert not names_this_machine(host)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"origin": "http://localhost:9464"},
        {"sec-fetch-site": "same-origin"},
        {"content-type": "application/json; charset=utf-8"},
    ],
)
def test_a_request_of_the_own_page_is_accepted(more: dict[str, str]):
    assert is_from_own_page(OWN | more)


@pytest.mark.parametrize(
    "more",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"content-type": "text/plain"},
        {"content-type": ""},
    ],
)
def test_a_request_of_another_site_is_refused(more: dict[str, str]):
    assert not is_from_own_page(OWN | more)


def test_a_request_without_the_mark_is_refused():
    assert not is_from_own_page({"host": "localhost", "content-type": "application/json"})


def test_nothing_inline_and_nothing_from_elsewhere_is_allowed():
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
