"""Access rights: patterns of namespaces, principals, and the book of tokens."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import product

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headrace import (
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Selector,
    StorageError,
    StreamId,
    Unauthenticated,
)
from headrace.server.access import (
    EVERYTHING,
    NamespaceGrant,
    NoTokens,
    Permission,
    Principal,
    TokenBook,
    check_token_name,
    new_token,
    principal_of,
    token_hash,
)
from headrace.store.control_store import ControlStore
from headrace.store.token_record import TokenRecord
from tests.random_examples import examples

PUBLISH, SUBSCRIBE, MANAGE = Permission.PUBLISH, Permission.SUBSCRIBE, Permission.MANAGE


def granted(*patterns: str) -> Principal:
    return Principal.of("orders-service", {SUBSCRIBE: patterns})


# Patterns


@pytest.mark.parametrize(
    ("pattern", "covered", "others"),
    [
        ("orders", ["orders"], ["order", "orders2", "Orders", "", "orders/eu", "orders*"]),
        ("orders*", ["orders", "orders2", "orders/eu", "orders*"], ["order", "Orders", "", " orders"]),
        ("*", ["", "orders", "*", "/", "\n"], []),
        ("orders%2A", ["orders*"], ["orders", "orders2", "orders%2A"]),
        ("orders%2a*", ["orders*", "orders*2"], ["orders", "orders2"]),
        ("a%2Fb", ["a/b"], ["a", "a%2Fb"]),
        ("100%25", ["100%"], ["100", "100%25"]),
        ("caf%C3%A9", ["café"], ["cafe", "caf"]),
        ("café", ["café"], ["cafe\u0301"]),
        ("", [""], ["orders"]),
    ],
)
def test_a_pattern_is_a_namespace_or_how_some_begin(pattern: str, covered: Sequence[str], others: Sequence[str]):
    grant = NamespaceGrant.of([pattern])
    assert [one for one in covered if not grant.covers(one)] == []
    assert [one for one in others if grant.covers(one)] == []


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*orders", "or the beginning of several, as in orders*; there are no other wildcards"),
        ("or*ders*", "there are no other wildcards"),
        ("orders**", "there are no other wildcards"),
        ("order?", "there are no other wildcards"),
        ("?*", "there are no other wildcards"),
        ("orders/*", "holds for all keys of a namespace, so leave out the slash and the text after it"),
        ("orders/", "leave out the slash"),
        ("100%", "has a % that begins no escape"),
        ("caf%C3", "percent escapes that are not UTF-8"),
        ("caf%C3*", "percent escapes that are not UTF-8"),
        ("x" * 1025, "has 1,025 bytes in UTF-8, the limit is 1,024"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_another_pattern_is_refused(pattern: str, why: str):
    with pytest.raises(InvalidArgument, match=re.escape(why)) as caught:
        NamespaceGrant.of(["fine", pattern])
    assert "\n" not in str(caught.value)


def test_no_permission_includes_another():
    for one in Permission:
        principal = Principal.of("x", {one: ["*"]})
        assert [other for other in Permission if principal.allows(other, "orders")] == [one]
        assert [other for other in Permission if principal.allows_selector(other, "orders/*")] == [one]
        assert [other for other in Permission if principal.allows_everywhere(other)] == [one]


@pytest.mark.parametrize(
    ("patterns", "selector", "allowed"),
    [
        (["orders"], "orders/*", True),
        (["orders"], "orders/a*b", True),
        (["orders"], "orders/17", True),
        (["orders"], "orders*/*", False),
        (["orders"], "order?/*", False),
        (["orders"], "*/17", False),
        (["orders"], "%6Frders/*", True),
        (["orders*"], "orders/*", True),
        (["orders*"], "orders*/*", True),
        (["orders*"], "orders-??-*/*", True),
        (["orders*"], "order*/*", False),
        (["orders*"], "order?/*", False),
        (["orders*"], "*orders*/*", False),
        (["orders*"], "orders%2A/*", True),
        (["orders%2A*"], "orders*/*", False),
        (["orders%2A*"], "orders%2A*/*", True),
        (["order%3F*"], "order?/*", False),
        (["order%3F"], "order?/*", False),
        (["order%3F"], "order%3f/*", True),
        (["*"], "*/*", True),
        (["*"], "?/x", True),
        ([], "orders/*", False),
        (["a*", "b*"], "b?/*", True),
        (["a*", "b*"], "*/*", False),
    ],
)
def test_a_selector_is_allowed_where_all_it_can_match_is_granted(patterns: list[str], selector: str, allowed: bool):
    assert granted(*patterns).allows_selector(SUBSCRIBE, selector) is allowed


@pytest.mark.parametrize("text", ["orders", "", "100%/x", "caf%C3*%A9/x"])
def test_invalid_selector_is_refused_whatever_the_grants(text: str):
    for principal in (EVERYTHING, granted(), granted("*"), granted("orders")):
        with pytest.raises(InvalidArgument):
            principal.allows_selector(SUBSCRIBE, text)


# Against brute force: every namespace of up to three of these characters. The escaped forms are in the patterns and
# selectors. The selector of the same text, which is another program, says which namespaces a pattern covers.
CHARACTERS = "aé*?/%"
NAMESPACES = ["".join(letters) for length in range(4) for letters in product(CHARACTERS, repeat=length)]
PIECES = ["a", "é", "%61", "%C3%A9", "%2A", "%3F", "%2F", "%25"]


def texts(*more: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*PIECES, *more]), max_size=3).map("".join)


pattern_texts = st.builds("".join, st.tuples(texts(), st.sampled_from(["", "*"])))
patterns = st.lists(pattern_texts, max_size=3)


@given(patterns)
def test_a_pattern_covers_the_streams_that_its_selector_selects(several: list[str]):
    grant = NamespaceGrant.of(several)
    selected = [Selector(f"{pattern}/*").matcher() for pattern in several]
    for namespace in NAMESPACES:
        assert grant.covers(namespace) == any(matches(StreamId(namespace, "k")) for matches in selected)


@given(patterns, texts("*", "?"), st.sampled_from(["k", "*", "?"]))
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.filter_too_much])
def test_an_allowed_selector_matches_no_namespace_that_is_not_granted(several: list[str], namespace: str, key: str):
    principal, selector = granted(*several), f"{namespace}/{key}"
    assume(principal.allows_selector(SUBSCRIBE, selector))
    matches = Selector(selector).matcher()
    assert [ns for ns in NAMESPACES if matches(StreamId(ns, "k")) and not principal.allows(SUBSCRIBE, ns)] == []


@given(pattern_texts, texts("*", "?"))
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.filter_too_much])
def test_a_selector_refused_under_one_pattern_matches_something_that_is_not_granted(pattern: str, namespace: str):
    principal, selector = granted(pattern), f"{namespace}/*"
    assume(not principal.allows_selector(SUBSCRIBE, selector))
    matches = Selector(selector).matcher()
    # A wildcard stands for another character somewhere, or for none.
    others = [*NAMESPACES, *("".join(letters) for letters in product(f"{CHARACTERS}x", repeat=4))]
    assert any(matches(StreamId(ns, "k")) and not principal.allows(SUBSCRIBE, ns) for ns in others)


@given(patterns, st.sampled_from(NAMESPACES))
def test_one_stream_is_allowed_as_its_namespace_is(several: list[str], namespace: str):
    principal = granted(*several)
    text = str(StreamId(namespace, "k"))
    assert principal.allows_selector(SUBSCRIBE, text) == principal.allows(SUBSCRIBE, namespace)


# Principals


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises(PermissionDenied) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_refusal_names_the_principal_the_permission_and_the_remedy():
    principal = granted("orders")
    assert refusal(lambda: principal.require(PUBLISH, "a/b")) == (
        "client 'orders-service' may not publish to namespace 'a/b': use a token made with --publish 'a%2Fb'"
    )
    assert refusal(lambda: principal.require_selector(SUBSCRIBE, "*/x")) == (
        "client 'orders-service' may not subscribe to everything that '*/x' selects: narrow the selector, or use a "
        "token made with a wider --subscribe"
    )
    assert refusal(lambda: principal.require_everywhere(MANAGE)) == (
        "client 'orders-service' may not manage all namespaces, as this needs: use a token made with --manage '*'"
    )
    assert refusal(lambda: Principal.of("x", {}).require_somewhere(PUBLISH)) == (
        "client 'x' may not publish to any namespace, as this needs: use a token made with --publish"
    )


def test_granted_call_is_not_refused():
    principal = Principal.of("x", {PUBLISH: ["orders"], SUBSCRIBE: ["o*"], MANAGE: ["a", "*"]})
    principal.require(PUBLISH, "orders")
    principal.require_selector(SUBSCRIBE, "or*/*")
    principal.require_everywhere(MANAGE)
    principal.require_somewhere(PUBLISH)
    principal.require_subscription([MANAGE], "stats", "secret/*")
    principal.require_subscription([PUBLISH, SUBSCRIBE], "stats", "orders/*")


def test_only_principals_with_a_permission_learn_that_a_subscription_exists():
    limited, wide = granted("orders*"), granted("*")
    ask = [SUBSCRIBE, MANAGE]
    missing = refusal(lambda: limited.require_subscription(ask, "stats", None))
    assert missing == refusal(lambda: limited.require_subscription(ask, "stats", "secret/*"))
    assert missing == (
        "client 'orders-service' may subscribe to or manage no subscription 'stats': check its name and the "
        "permissions of the token"
    )
    with pytest.raises(NotFound, match="there is no subscription 'stats'"):
        wide.require_subscription(ask, "stats", None)
    limited.require_subscription(ask, "stats", "orders/*")


def test_principal_with_any_permission_is_known():
    assert EVERYTHING.allows_anything()
    assert granted("orders").allows_anything()
    assert not granted().allows_anything()
    assert not Principal("x", {}).allows_anything()


def test_without_tokens_everybody_may_do_everything():
    gate = NoTokens()
    for authorization in (None, "Bearer hr_x", b"nonsense"):
        principal = gate.authenticate(authorization)
        assert principal.name == ""
        assert all(principal.allows_everywhere(one) for one in Permission)
        assert gate.still_valid(principal)


# Tokens


def test_a_token_is_random_and_only_its_hash_is_in_the_record():
    made = [new_token("a", {PUBLISH: ["orders*"], MANAGE: []}, 17) for _ in range(100)]
    assert len({token.text for token in made}) == 100
    for text, record in made:
        assert re.fullmatch(r"hr_[A-Za-z0-9_-]{43}", text)
        assert record == TokenRecord("a", token_hash(text), {"publish": ("orders*",)}, 17, "a")
        assert text not in repr(record)


@pytest.mark.parametrize(
    ("name", "permissions", "why"),
    [
        ("a", {}, "token 'a' would have no permission: give it --publish, --subscribe or --manage"),
        ("a", {PUBLISH: []}, "token 'a' would have no permission"),
        ("a", {PUBLISH: ["*x"]}, "'*x' is not a pattern of namespaces"),
        ("a b", {PUBLISH: ["x"]}, "'a b' is not a token name: letters, digits, dot, dash and underscore"),
        ("", {PUBLISH: ["x"]}, "'' is not a token name"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(name: str, permissions: dict[Permission, list[str]], why: str):
    with pytest.raises(InvalidArgument, match=re.escape(why)):
        new_token(name, permissions, 1)


def test_a_name_of_a_token_is_one_of_a_subscription():
    assert check_token_name("orders-service.2") == "orders-service.2"


def test_a_record_becomes_the_principal_it_was_made_for():
    record = new_token("a", {PUBLISH: ["orders*", "x"], MANAGE: ["*"]}, 1).record
    principal = principal_of(record)
    assert principal.name == "a"
    assert principal.allows(PUBLISH, "orders-eu")
    assert principal.allows(PUBLISH, "x")
    assert not principal.allows(SUBSCRIBE, "x")
    assert principal.allows_everywhere(MANAGE)


# The book


@pytest_asyncio.fixture
async def store() -> AsyncIterator[ControlStore]:
    store = await ControlStore.open("memory")
    yield store
    await store.aclose()


async def made(store: ControlStore, name: str, *patterns: str) -> str:
    text, record = new_token(name, {PUBLISH: patterns or ("*",)}, 1)
    await store.add_token(record)
    return f"Bearer {text}"


def refused(book: TokenBook, authorization: str | bytes | None) -> str:
    with pytest.raises(Unauthenticated) as caught:
        book.authenticate(authorization)
    return str(caught.value)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 (it polls what a task of the book changes)
            await asyncio.sleep(0.001)


async def test_a_token_identifies_its_principal(store: ControlStore):
    authorization = await made(store, "a", "orders*")
    other = await made(store, "b")
    async with TokenBook.opened(store) as book:
        for form in (authorization, authorization.encode(), authorization.replace("Bearer ", "bearer  ")):
            principal = book.authenticate(form)
            assert principal.name == "a"
            assert principal.allows(PUBLISH, "orders-eu")
            assert not principal.allows(PUBLISH, "secret")
            assert book.still_valid(principal)
        assert book.authenticate(other).name == "b"


@pytest.mark.parametrize(
    ("authorization", "why"),
    [
        (None, "no token: send the metadata `authorization: Bearer hr_...`"),
        ("", "the metadata `authorization` is not a bearer token"),
        ("Bearer", "is not a bearer token"),
        ("Bearer  ", "is not a bearer token"),
        ("Basic c2VjcmV0", "is not a bearer token"),
        ("hr_secret", "is not a bearer token"),
        ("Bearer hr_secret", "the token is unknown or was revoked"),
        (b"Bearer \xff\xfesecret", "the token is unknown or was revoked"),
        ("Bearer \ud800secret", "the token is unknown or was revoked"),
    ],
)
async def test_another_is_refused_without_repeating_it(
    store: ControlStore, authorization: str | bytes | None, why: str
):
    await made(store, "a")
    async with TokenBook.opened(store) as book:
        said = refused(book, authorization)
    assert why in said
    assert "secret" not in said


async def test_every_other_token_is_refused(store: ControlStore):
    authorization = await made(store, "a")
    async with TokenBook.opened(store) as book:
        for at in range(len("Bearer "), len(authorization)):
            changed = "A" if authorization[at] != "A" else "B"
            refused(book, authorization[:at] + changed + authorization[at + 1 :])
        refused(book, authorization[:-1])
        refused(book, authorization + "A")


async def test_the_hash_of_a_token_is_no_token(store: ControlStore):
    await made(store, "a")
    (record,) = await store.tokens()
    async with TokenBook.opened(store) as book:
        refused(book, b"Bearer " + record.hash)
        refused(book, f"Bearer {record.hash.hex()}")


async def test_hashes_that_begin_alike_are_told_apart():
    book = TokenBook(Failing())
    text = "hr_x"
    real = token_hash(text)
    book.load([
        TokenRecord("other", real[:8] + bytes(24), {"publish": ("*",)}, 1, "other"),
        TokenRecord("real", real, {"publish": ("*",)}, 1, "real"),
    ])  # fmt: skip
    assert book.authenticate(f"Bearer {text}").name == "real"


async def test_tokens_made_and_revoked_count_while_the_book_is_open(store: ControlStore):
    async with TokenBook.opened(store, refresh_s=0.001) as book:
        authorization = await made(store, "a")
        await until(lambda: accepts(book, authorization))
        principal = book.authenticate(authorization)
        await store.delete_token("a")
        await until(lambda: not book.still_valid(principal))
        refused(book, authorization)


def accepts(book: TokenBook, authorization: str) -> bool:
    try:
        book.authenticate(authorization)
    except Unauthenticated:
        return False
    return True


async def test_a_principal_stays_valid_for_as_long_as_its_token_is_there(store: ControlStore):
    authorization = await made(store, "a")
    async with TokenBook.opened(store) as book:
        principal = book.authenticate(authorization)
        await made(store, "b")
        await book.refresh()
        assert book.still_valid(principal)
        assert book.authenticate(authorization) is principal


async def test_a_new_token_of_the_same_name_does_not_revive_the_old_one(store: ControlStore):
    old = await made(store, "a")
    async with TokenBook.opened(store) as book:
        principal = book.authenticate(old)
        await store.delete_token("a")
        new = await made(store, "a")
        await book.refresh()
        assert not book.still_valid(principal)
        refused(book, old)
        assert book.still_valid(book.authenticate(new))


async def test_a_principal_without_a_token_is_not_valid(store: ControlStore):
    async with TokenBook.opened(store) as book:
        assert not book.still_valid(EVERYTHING)
        assert not book.still_valid(Principal("a", {}))


class Failing:
    """A store that has its tokens, and an outage when told so."""

    def __init__(self) -> None:
        self.records: list[TokenRecord] = []
        self.error: HeadraceError | None = None
        self.reads = 0

    async def tokens(self) -> list[TokenRecord]:
        self.reads += 1
        if self.error:
            raise self.error
        return self.records


async def test_an_outage_of_the_store_keeps_the_book_as_it_was(caplog: pytest.LogCaptureFixture):
    store = Failing()
    text, record = new_token("a", {PUBLISH: ["*"]}, 1)
    store.records = [record]
    caplog.set_level(logging.INFO)
    async with TokenBook.opened(store, refresh_s=0.001) as book:
        principal = book.authenticate(f"Bearer {text}")
        store.error, store.records, reads = StorageError("locked"), [], store.reads
        await until(lambda: store.reads > reads + 3)
        assert book.still_valid(principal)
        assert book.authenticate(f"Bearer {text}") is principal
        store.error = None
        await until(lambda: not book.still_valid(principal))
    assert [message for _, _, message in caplog.record_tuples] == [
        "tokens cannot be read, known tokens stay valid: locked",
        "tokens can be read again",
    ]


async def test_a_book_that_cannot_be_read_at_first_does_not_open():
    store = Failing()
    store.error = StorageError("locked")
    with pytest.raises(StorageError, match="locked"):
        async with TokenBook.opened(store):
            pass


async def test_a_token_that_is_not_understood_allows_nothing_and_spoils_no_other(caplog: pytest.LogCaptureFixture):
    store = Failing()
    text, record = new_token("a", {PUBLISH: ["*"]}, 1)
    unknown = [new_token(name, {PUBLISH: ["*"]}, 1) for name in ("b", "c")]
    store.records = [
        record,
        unknown[0].record._replace(permissions={"publish": ("*",), "fly": ("*",)}),
        unknown[1].record._replace(permissions={"publish": ("*x",)}),
    ]
    async with TokenBook.opened(store) as book:
        await book.refresh()
        assert book.authenticate(f"Bearer {text}").allows(PUBLISH, "x")
        for token in unknown:
            assert not book.authenticate(f"Bearer {token.text}").allows_anything()
    assert len(caplog.messages) == 2  # once each
    assert "token 'b': 'fly' is not a valid Permission" in caplog.messages[0]
    assert "token 'c': '*x' is not a pattern" in caplog.messages[1]
