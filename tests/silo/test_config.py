"""Configuration of a silo: file, variables, flags, and refused values."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from headrace import InvalidArgument
from headrace.server.config import GrpcConfig, HttpConfig, read_credentials
from headrace.server.limits import ClientLimits
from headrace.silo.addresses import parse_address
from headrace.silo.config import (
    CacheConfig,
    ProviderConfig,
    SiloConfig,
    check,
)
from headrace.silo.config_loader import load_config, unknown_variables
from tests.certificates import Authority

FULL = """
data = "data"
modules = ["shop.handlers", "shop.reports"]
drain_s = 3
log_level = "warning"

[http]
host = "0.0.0.0"
port = 9464
certificate = "tls/web.pem"
key = "tls/web.key"
dashboard = true
insecure = true
auth = "tokens"

[grpc]
host = "0.0.0.0"
port = 9465
native_port = 9466
certificate = "tls/silo.pem"
key = "tls/silo.key"
client_ca = "/etc/ca.pem"
auth = "tokens"
session_timeout_s = 5
limits = { calls = 7, requests_per_s = 50 }

[providers.default]
adapter = "log"
queues = 4
options = { durability = "relaxed", retain_age_s = 86400 }
cache = { max_events = 1000, max_bytes = 1_000_000 }
detach_after_s = 1.5
delays = "store"
outbox = "sqlite:///user.db"

[providers.fast]
adapter = "memory"
"""


def write(directory: Path, text: str) -> Path:
    file = directory / "silo.toml"
    file.write_text(text)
    return file


def load(
    directory: Path, text: str = "", environ: dict[str, str] | None = None, flags: dict[str, Any] | None = None
) -> SiloConfig:
    return load_config(write(directory, text), environ or {}, flags or {})


def refusal(directory: Path, text: str = "", environ: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidArgument) as caught:
        load(directory, text, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(directory / "silo.toml"), "FILE")


def test_every_option_of_the_file_arrives(tmp_path: Path):
    assert load(tmp_path, FULL) == SiloConfig(
        data=str(tmp_path / "data"),
        modules=("shop.handlers", "shop.reports"),
        drain_s=3.0,
        log_level="warning",
        http=HttpConfig(
            host="0.0.0.0",
            port=9464,
            certificate=str(tmp_path / "tls" / "web.pem"),
            key=str(tmp_path / "tls" / "web.key"),
            dashboard=True,
            insecure=True,
            auth="tokens",
        ),
        grpc=GrpcConfig(
            host="0.0.0.0",
            port=9465,
            native_port=9466,
            certificate=str(tmp_path / "tls" / "silo.pem"),
            key=str(tmp_path / "tls" / "silo.key"),
            client_ca="/etc/ca.pem",
            auth="tokens",
            session_timeout_s=5.0,
            limits=ClientLimits(calls=7, requests_per_s=50),
        ),
        providers={
            "default": ProviderConfig(
                adapter="log",
                queues=4,
                options={"durability": "relaxed", "retain_age_s": 86400},
                cache=CacheConfig(max_events=1000, max_bytes=1_000_000),
                detach_after_s=1.5,
                delays="store",
                outbox="sqlite:///user.db",
            ),
            "fast": ProviderConfig(adapter="memory"),
        },
    )


def test_without_anything_there_is_one_provider_called_default():
    config = load_config(None, {}, {})
    assert config == SiloConfig()
    assert config.providers == {"default": ProviderConfig()}


def test_a_provider_is_opened_as_it_is_configured(tmp_path: Path):
    options = load(tmp_path, FULL).providers["default"].named("default")
    assert (options.name, options.adapter, options.queues, options.detach_after_s) == ("default", "log", 4, 1.5)
    assert (options.cache.max_events, options.cache.max_bytes) == (1000, 1_000_000)
    assert options.delays == "store"
    assert options.outbox == "sqlite:///user.db"
    assert options.options == {"durability": "relaxed", "retain_age_s": 86400}


def test_variables_go_before_the_file_and_flags_before_variables(tmp_path: Path):
    file = '[http]\nport = 1\nhost = "file"\n[providers.default]\nqueues = 1\n'
    environ = {"HEADRACE_HTTP__PORT": "2", "HEADRACE_PROVIDERS__DEFAULT__ADAPTER": "memory", "HEADRACE_DATA": "env"}

    config = load(tmp_path, file, environ, {"http": {"port": 3}})

    assert config.http == HttpConfig(host="file", port=3)
    assert config.providers["default"] == ProviderConfig(adapter="memory", queues=1)
    assert config.data == "env"
    assert load(tmp_path, file, environ).http.port == 2


def test_only_the_file_s_data_directory_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "etc"
    folder.mkdir()
    write(folder, 'data = "d"')
    monkeypatch.chdir(tmp_path)

    def data(environ: dict[str, str], flags: dict[str, Any]) -> str | None:
        return load_config(Path("etc/silo.toml"), environ, flags).data

    assert data({}, {}) == str(folder / "d")
    assert data({"HEADRACE_DATA": "e"}, {}) == "e"
    assert data({"HEADRACE_DATA": "e"}, {"data": "f"}) == "f"
    assert load(folder, 'data = "/srv/d"').data == "/srv/d"


def default(**options: Any) -> SiloConfig:
    return SiloConfig(providers={"default": ProviderConfig(**options)})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DATA", "2026", SiloConfig(data="2026")),
        ("MODULES", "a.b, c", SiloConfig(modules=("a.b", "c"))),
        ("MODULES", "", SiloConfig()),
        ("DRAIN_S", "1.5", SiloConfig(drain_s=1.5)),
        ("HTTP__PORT", "0", SiloConfig(http=HttpConfig(port=0))),
        ("GRPC__PORT", "0", SiloConfig(grpc=GrpcConfig(port=0))),
        ("GRPC__INSECURE", "true", SiloConfig(grpc=GrpcConfig(insecure=True))),
        ("GRPC__INSECURE", "1", SiloConfig(grpc=GrpcConfig(insecure=True))),
        ("GRPC__NATIVE", "false", SiloConfig(grpc=GrpcConfig(native=False))),
        ("GRPC__NATIVE_PORT", "7", SiloConfig(grpc=GrpcConfig(native_port=7))),
        ("GRPC__AUTH", "none", SiloConfig(grpc=GrpcConfig(auth="none"))),
        ("GRPC__SESSION_TIMEOUT_S", "2.5", SiloConfig(grpc=GrpcConfig(session_timeout_s=2.5))),
        ("GRPC__LIMITS__CALLS", "9", SiloConfig(grpc=GrpcConfig(limits=ClientLimits(calls=9)))),
        ("PROVIDERS__DEFAULT__QUEUES", "16", default(queues=16)),
        ("PROVIDERS__DEFAULT__DELAYS", "store", default(delays="store")),
        ("PROVIDERS__DEFAULT__CACHE__MAX_BYTES", "9", default(cache=CacheConfig(max_bytes=9))),
        ("PROVIDERS__DEFAULT__OPTIONS__DURABILITY", "relaxed", default(options={"durability": "relaxed"})),
        ("PROVIDERS__DEFAULT__OPTIONS__RETAIN_AGE_S", "60", default(options={"retain_age_s": 60})),
        ("PROVIDERS__DEFAULT__OPTIONS__X", "false", default(options={"x": False})),
        ("PROVIDERS__DEFAULT__OPTIONS__X", "[" * 20_000, default(options={"x": "[" * 20_000})),
    ],
)
def test_a_variable_is_understood_as_its_option_is(tmp_path: Path, variable: str, text: str, expected: SiloConfig):
    assert load(tmp_path, "", {f"HEADRACE_{variable}": text}) == expected


def test_variables_of_other_programs_are_left_alone(tmp_path: Path):
    assert load(tmp_path, "", {"HEADRACE_INSTALL_SERVERS": "1", "HOME": "/", "HTTP__PORT": "3"}) == SiloConfig()


CLUSTER = "data = 'd'\n[grpc]\nport = 1\n[cluster]\nstore = '{}'\n"


@pytest.mark.parametrize(
    "store",
    [
        "headrace:s3cret@127.0.0.1",
        "postgresql://u:s3cret/x@h/db",
        "postgresql://u:s3cret@x@h/db",
        "postgresql://u:s3cret#x@h/db",
        "postgresql://u:s3cret?x@h/db",
        "postgresql://u:s3cret@h:port/db",
        "postgresql://u:s3cret@[::1/db",
        "postgresql://u:s3cret@/db",
        "postgresql:///db",
        "sqlite:///s3cret.db",
        "mysql://u:s3cret@h/db",
        "s3cret",
        "",
    ],
)
def test_a_store_that_is_no_url_of_postgres_is_refused_and_not_shown(tmp_path: Path, store: str):
    refused = refusal(tmp_path, CLUSTER.format(store))
    assert refused.startswith("cluster.store is no URL of a PostgreSQL database: write postgresql://USER:PASSWORD@HOST")
    assert "s3cret" not in refused


@pytest.mark.parametrize(
    "store",
    [
        "postgresql://h/db",
        "postgresql+psycopg://u:a%2Fb%40c@h:5433/db?sslmode=require",
        "postgresql://u@[::1]:5432/db",
        "postgresql:///db?host=/run/postgresql",
        "postgresql://u:p@/db?host=h1,h2",
    ],
)
def test_a_store_is_any_url_of_postgres_with_a_host(tmp_path: Path, store: str):
    cluster = load(tmp_path, CLUSTER.format(store)).cluster
    assert cluster is not None
    assert cluster.store == store


def balanced(text: str, providers: str = "") -> str:
    return f"data = 'd'\n[grpc]\nport = 0\n[cluster]\n{text}\n{providers}"


@pytest.mark.parametrize(
    ("text", "providers", "message"),
    [
        ("balancer = 'best-fit-fixed'", "",
         "cluster.balancer is 'best-fit-fixed', which needs cluster.fixed: give it"),
        ("balancer = 'best-fit-live'", "",
         "cluster.balancer is 'best-fit-live', which needs cluster.fixed: give it"),
        ("balancer = 'static'", "", "cluster.balancer is 'static', which needs cluster.mapping: give it"),
        ("fixed = ['a']", "", "cluster.fixed is given, and the balancer 'lease-count' ignores it: leave it out"),
        ("balancer = 'average'\nfixed = ['a']", "", "cluster.fixed is given, and the balancer 'average' ignores"),
        ("balancer = 'ring'\nmapping = { 0 = 'a' }", "", "cluster.mapping is given, and the balancer 'ring' ignores"),
        ("balancer = 'static'\nmapping = { 0 = 'a' }\nfixed = ['a']", "",
         "cluster.fixed is given, and the balancer 'static' ignores it"),
        ("balancer = 'best-fit-live'\nmapping = { 0 = 'a' }\nfixed = ['a']", "",
         "cluster.mapping is given, and the balancer 'best-fit-live' ignores it"),
        ("balancer = 'static'\nmapping = { 0 = 'a', 4 = 'b' }", "[providers]\na.queues = 2\nb.queues = 4",
         "cluster.mapping: no provider has a queue 4: the highest queue is 3"),
        ("balancer = 'static'\nmapping = { x = 'a' }", "", "cluster.mapping: 'x' is no queue: queues are numbers"),
        ("balancer = 'rign'", "", "cluster.balancer: there is no balancer 'rign'; installed are: average, best-fit-"),
    ],
)  # fmt: skip
def test_a_balancer_that_would_leave_queues_without_an_owner_is_refused(
    tmp_path: Path, text: str, providers: str, message: str
):
    assert refusal(tmp_path, balanced(text, providers)).startswith(message)


@pytest.mark.parametrize(
    ("text", "providers"),
    [
        ("", ""),
        ("balancer = 'best-fit-live'\nfixed = ['who', 'may', 'come']", ""),
        ("balancer = 'best-fit-fixed'\nfixed = ['a']", ""),
        ("balancer = 'static'\nmapping = { 3 = 'a' }", "[providers]\na.queues = 2\nb.queues = 4"),
        ("balancer = 'static'\nmapping = { 9 = 'a' }", "[providers]\na.queues = 2\nb.adapter = 'log'"),
        ("balancer = 'static'\nmapping = { 9 = 'a' }", ""),
    ],
)
def test_a_balancer_with_its_options_is_accepted(tmp_path: Path, text: str, providers: str):
    assert load(tmp_path, balanced(text, providers)).cluster is not None


def test_a_variable_that_is_no_option_is_told_of():
    (line,) = unknown_variables({
        "HEADRACE_DTA": "d", "HEADRACE_DATA": "d", "HEADRACE_HTTP__PORT": "1", "HEADRACE_PROVIDER": "a",
        "HEADRACE_GRPC__PORT": "1",
        "HEADRACE_INSTALL_SERVERS": "1", "HOME": "/",
    })  # fmt: skip
    assert line.startswith("variable HEADRACE_DTA is no option and without effect: accepted are HEADRACE_DATA, ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 3", "FILE: prot: unknown option; accepted are data, modules, drain_s, workers, log_level,"),
        ("[http]\nworkers = 2", ("FILE: [http] workers: unknown option; accepted are host, port, certificate, key, "
         "dashboard, insecure, auth. workers belongs to the top, not into http")),
        ("[http]\nprot = 3", "FILE: [http] prot: unknown option; accepted are host, port"),
        ("[providers.a.cache]\nmax = 3",
         "FILE: [providers.a.cache] max: unknown option; accepted are max_events, max_bytes"),
        ("[providers.a]\ndelays = 'http://u:secret@h'",
         "FILE: [providers.a]: delays is \"store\", or left out, not 'h'"),
        ("[providers.a]\nqueue = 3", "FILE: [providers.a] queue: unknown option; accepted are adapter, queues, opt"),
        ("[providers.a]\nqueues = 'x'", 'FILE: [providers.a] queues = "x": expected an integer >= 1'),
        ("[providers.a]\n[providers.b]\nqueues = '8'",
         'FILE: [providers.b] queues = "8": expected an integer >= 1; write queues = 8'),
        ("[providers.a]\nqueues = 0", "FILE: [providers.a] queues = 0: expected an integer >= 1"),
        ("[providers.a]\nqueues = true", "FILE: [providers.a] queues = true: expected an integer >= 1"),
        ("[http]\nport = 65536", "FILE: [http] port = 65536: expected an integer >= 0 and <= 65535"),
        ("http = 3", "FILE: http = 3: expected a table"),
        ("providers = []", "FILE: providers = []: expected a table"),
        ("providers.a = 1", "FILE: [providers] a = 1: expected a table"),
        ("modules = 'shop'", 'FILE: modules = "shop": expected a list of texts; write modules = ["shop"]'),
        ("modules = [1]", "FILE: modules = [1]: expected a list of texts"),
        ("data = 3", 'FILE: data = 3: expected text; write data = "3"'),
        ("data = { password = 's3cret' }", "FILE: data: expected text"),
        ("[grpc]\nport = -1", "FILE: [grpc] port = -1: expected an integer >= 0"),
        ("[grpc]\nprot = 1", "FILE: [grpc] prot: unknown option; accepted are host, port, native, native_port, "),
        ("[grpc]\ninsecure = 'yes'", 'FILE: [grpc] insecure = "yes": expected true or false'),
        ("[grpc]\nauth = 'token'", 'FILE: [grpc] auth = "token": expected "none" or "tokens"'),
        ("[grpc]\nsession_timeout_s = 0", "FILE: [grpc] session_timeout_s = 0: expected a number > 0"),
        ("[grpc]\nlimits = { call = 1 }",
         "FILE: [grpc.limits] call: unknown option; accepted are connections, calls, requests_per_s, burst, "),
        ("[grpc]\nlimits = { calls = 0 }", "FILE: [grpc.limits] calls = 0: expected an integer >= 1"),
        ("[grpc]\nlimits = { requests_per_s = 0 }", "FILE: [grpc.limits] requests_per_s = 0: expected a number > 0"),
        ("[grpc]\nlimits = { publish_bytes = 1 }", "FILE: [grpc.limits]: publish_bytes is 1, below message_"),
        ("[grpc]\nlimits = 3", "FILE: [grpc] limits = 3: expected a table"),
        ("[cluster]\nmapping = { 0 = 'a', 1 = 2 }", 'FILE: [cluster.mapping] 1 = 2: expected text; write 1 = "2"'),
        ("log_level = 'loud'", 'FILE: log_level = "loud": expected "debug", "error", "info" or "warning"'),
        ("drain_s = -1", "FILE: drain_s = -1: expected a number >= 0"),
        ("x =", "FILE: not TOML: Invalid value (at end of document)"),
        (f"x = {'[' * 20_000}", "FILE: its lists and tables are nested too deeply"),
    ],
)  # fmt: skip
def test_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, message: str):
    assert refusal(tmp_path, text).startswith(message)


def test_a_table_and_a_variable_in_a_wrong_place_are_sent_to_the_top(tmp_path: Path):
    assert refusal(tmp_path, "[cluster.grpc]\nport = 1").endswith("grpc belongs to the top, not into cluster")
    with pytest.raises(InvalidArgument, match="workers belongs to the top, not into http"):
        load_config(None, {"HEADRACE_HTTP__WORKERS": "2"}, {})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HTTP__PROT", "3", "HEADRACE_HTTP__PROT: unknown option; accepted are host, port"),
        ("HTTP__PORT", "x", 'HEADRACE_HTTP__PORT = "x": expected an integer >= 0 and <= 65535'),
        ("HTTP__PORT__X", "1", "HEADRACE_HTTP__PORT__X: expected an integer >= 0"),
        ("PROVIDERS__A__X", "1", "HEADRACE_PROVIDERS__A__X: unknown option; accepted are adapter, "),
        ("DRAIN_S", "soon", 'HEADRACE_DRAIN_S = "soon": expected a number >= 0'),
    ],
)  # fmt: skip
def test_mistake_in_a_variable_is_named(tmp_path: Path, variable: str, text: str, message: str):
    assert refusal(tmp_path, "", {f"HEADRACE_{variable}": text}).startswith(message)


def test_values_that_are_too_large_are_named(tmp_path: Path):
    deep, digits = "[" * 50_000, "9" * 5000
    port = "[http] port: expected an integer >= 0 and <= 65535"
    assert refusal(tmp_path, f"x = {deep}") == "FILE: its lists and tables are nested too deeply"
    assert refusal(tmp_path, f"[http]\nport = {digits}") == "FILE: an integer has more than 4,300 digits"
    assert refusal(tmp_path, f"[http]\nport = 0x{digits}") == f"FILE: {port}"
    assert refusal(tmp_path, "", {"HEADRACE_HTTP__PORT": deep}).startswith("HEADRACE_HTTP__PORT: expected an integer")
    config = load(tmp_path, "", {"HEADRACE_PROVIDERS__A__OPTIONS__MAP_BYTES": deep})
    assert config.providers["a"].options == {"map_bytes": deep}  # the adapter refuses it


@pytest.mark.parametrize("option", ["data", "http.certificate", "http.host", "providers.a.outbox", "modules"])
def test_a_nul_character_is_refused(tmp_path: Path, option: str):
    value = '["a\\u0000"]' if option == "modules" else '"a\\u0000"'
    section, _, name = option.rpartition(".")
    shown = f"[{section}] {name}" if section else name
    assert refusal(tmp_path, f"{option} = {value}") == f"FILE: {shown}: a NUL character is not accepted"


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "silo.toml").write_bytes(b"data = '\xff'")
    with pytest.raises(InvalidArgument, match="not UTF-8 at byte 8"):
        load_config(tmp_path / "silo.toml", {}, {})


def test_a_wrong_flag_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match=r"command line: \[http\] port = -1: expected an integer >= 0"):
        load(tmp_path, "", {}, {"http": {"port": -1}})


# gRPC: options that go together, and options that would admit every caller


def grpc(**options: Any) -> SiloConfig:
    served: dict[str, Any] = {"port": 0}
    return SiloConfig(data="d", grpc=GrpcConfig(**(served | options)))


TLS: dict[str, Any] = {"certificate": "c.pem", "key": "c.key"}


def refused(config: SiloConfig) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_this_machine_may_come_without_more(host: str):
    check(grpc(host=host))
    assert not grpc(host=host).grpc.asks_for_tokens


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.7", "2001:db8::7", "::ffff:10.0.0.7", "silo.example.org", "localhost.example.org",
             "localhost.", "127.1", "0", "", "*", " 127.0.0.1", "unix:/run/x"]
)  # fmt: skip
def test_an_address_that_others_may_reach_needs_tls(host: str):
    assert refused(grpc(host=host)) == (
        f"grpc.host is {host!r}, which other machines may reach, and there is no TLS: give grpc.certificate and "
        "grpc.key (--certificate, --key), serve on 127.0.0.1, or allow it with grpc.insecure (--insecure)"
    )
    check(grpc(host=host, insecure=True))
    check(grpc(host=host, **TLS))
    check(SiloConfig(grpc=GrpcConfig(host=host)))  # not served


@pytest.mark.parametrize(
    ("options", "asks"),
    [
        ({}, False),
        ({"auth": "tokens"}, True),
        (TLS, False),
        ({"host": "0.0.0.0", **TLS}, True),
        ({"host": "0.0.0.0", **TLS, "auth": "none"}, False),
        ({"host": "0.0.0.0", **TLS, "client_ca": "ca.pem"}, False),
        ({"host": "0.0.0.0", **TLS, "client_ca": "ca.pem", "auth": "tokens"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "insecure": True, "auth": "tokens"}, True),
    ],
)
def test_asking_for_tokens(options: dict[str, Any], asks: bool):
    config = grpc(**options)
    check(config)
    assert config.grpc.asks_for_tokens is asks


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (grpc(certificate="c.pem"), "grpc.certificate is given without grpc.key: TLS needs both"),
        (grpc(key="c.key"), "grpc.key is given without grpc.certificate: TLS needs both"),
        (grpc(native=False, native_port=7), "grpc.native_port is given and grpc.native is false: leave out one"),
        (grpc(port=7, native_port=7), "grpc.native_port is 7, which another server of the silo has, too"),
        (grpc(port=None, key="c.key"), "grpc.key is given without grpc.certificate: TLS needs both"),
        (SiloConfig(http=HttpConfig(key="c.key")), "http.key is given without http.certificate: TLS needs both"),
        (grpc(client_ca="ca.pem"),
         "grpc.client_ca is given without grpc.certificate and grpc.key: it is part of TLS"),
        (grpc(insecure=True, **TLS), "grpc.insecure turns TLS off, and grpc.certificate turns it on: leave out one"),
        (SiloConfig(grpc=GrpcConfig(port=0, auth="tokens")),
         "grpc.auth is tokens, and tokens are kept in a data directory: name it with --data, with HEADRACE_DATA, or "),
        (SiloConfig(grpc=GrpcConfig(port=0, host="0.0.0.0", **TLS)), "grpc.auth is tokens, and tokens are kept in a"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(config: SiloConfig, why: str):
    assert refused(config).startswith(why)


def http_config(port: int | None = 0, **options: Any) -> HttpConfig:
    return HttpConfig(port=port, **options)


OPEN_GRPC: dict[str, Any] = {"port": 0, "host": "0.0.0.0", **TLS}


@pytest.mark.parametrize(
    ("http", "grpc", "served", "asks"),
    [
        ({"port": None}, {}, False, False),
        ({}, {}, True, False),
        ({"dashboard": False}, {}, False, False),
        ({"auth": "tokens"}, {}, True, True),
        ({}, {"port": 0}, True, False),
        ({}, {"port": 0, "auth": "tokens"}, True, True),
        ({}, OPEN_GRPC, True, True),
        ({}, {**OPEN_GRPC, "client_ca": "ca.pem"}, True, True),
        ({"auth": "none"}, OPEN_GRPC, True, False),
        ({"host": "0.0.0.0"}, {}, False, True),
        ({"host": "0.0.0.0", **TLS}, {}, True, True),
        ({"host": "0.0.0.0", "dashboard": True, "insecure": True}, {}, True, True),
    ],
)
def test_where_the_dashboard_is_served_and_asks_for_tokens(
    http: dict[str, Any], grpc: dict[str, Any], served: bool, asks: bool
):
    config = SiloConfig(data="data", http=http_config(**http), grpc=GrpcConfig(**grpc))
    check(config)
    assert (config.http.serves_dashboard, config.dashboard_asks_for_tokens) == (served, asks)


@pytest.mark.parametrize(
    ("http", "why"),
    [
        ({"host": "0.0.0.0", "dashboard": True},
         "http.dashboard is true, http.host is '0.0.0.0', which other machines may reach, and there is no TLS: give "),
        ({"host": "0.0.0.0", "auth": "none", **TLS},
         "http.auth is none, and other machines may reach http.host '0.0.0.0': leave it out, so that the dashboard "),
        ({"auth": "tokens"}, "the dashboard asks for tokens, which are kept in a data directory: name it with --data"),
    ],
)  # fmt: skip
def test_a_dashboard_that_lets_anyone_in_is_refused(http: dict[str, Any], why: str):
    assert refused(SiloConfig(http=http_config(**http))).startswith(why)


def test_options_that_contradict_each_other_are_refused_from_any_source(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="which other machines may reach"):
        load(tmp_path, '[grpc]\nhost = "0.0.0.0"\n', {"HEADRACE_GRPC__PORT": "0"})
    assert load(tmp_path, '[grpc]\nhost = "0.0.0.0"\n', {"HEADRACE_GRPC__PORT": "0"}, {"grpc": {"insecure": True}})


def test_only_the_file_s_certificates_are_relative_to_the_file(tmp_path: Path):
    file = '[grpc]\ncertificate = "c.pem"\nkey = "c.key"\n'
    assert load(tmp_path, file).grpc.certificate == str(tmp_path / "c.pem")
    config = load(tmp_path, file, {"HEADRACE_GRPC__KEY": "env.key"}, {"grpc": {"client_ca": "flag.pem"}})
    assert (config.grpc.key, config.grpc.client_ca) == ("env.key", "flag.pem")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9465", ("127.0.0.1", 9465)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9465", ("::1", 9465)),
        ("[::]:1", ("::", 1)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]):
    assert parse_address(text) == address
    assert GrpcConfig(host=address[0]).at(address[1]) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", ":80", "80", "localhost", "localhost:", "::1:80", "[]:80", "h:-1", "h:x", "h:٣", "h:1000000", "h:1 "],
)
def test_another_text_is_no_address(text: str):
    with pytest.raises(InvalidArgument, match="is no address: write HOST:PORT, as in"):
        parse_address(text)


def test_a_port_is_at_most_65535():
    assert parse_address("h:65535") == ("h", 65535)
    with pytest.raises(InvalidArgument, match="'h:65536' is no address: ports are numbers up to 65535"):
        parse_address("h:65536")


# Files of TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the paths of the files by their content."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    certificate, key = authority.issue("localhost")
    _, other_key = authority.issue("other.example.org")
    (folder / "text").write_text("not PEM")
    names = {"certificate": certificate, "key": key, "other_key": other_key, "ca": authority.certificate}
    return {name: str(path) for name, path in names.items()} | {
        "text": str(folder / "text"), "folder": str(folder), "missing": str(folder / "missing"),
    }  # fmt: skip


def test_credentials_are_read_from_the_files(tls: dict[str, str]):
    assert read_credentials(GrpcConfig()) is None
    found = read_credentials(GrpcConfig(certificate=tls["certificate"], key=tls["key"]))
    assert found == (Path(tls["certificate"]).read_bytes(), Path(tls["key"]).read_bytes(), None)
    found = read_credentials(GrpcConfig(certificate=tls["certificate"], key=tls["key"], client_ca=tls["ca"]))
    assert found is not None
    assert found.client_ca == Path(tls["ca"]).read_bytes()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"certificate": "missing"}, r"grpc\.certificate: \S+missing cannot be read: No such file or directory"),
        ({"key": "folder"}, r"grpc\.key: \S+ cannot be read: Is a directory"),
        ({"client_ca": "missing"}, r"grpc\.client_ca: \S+missing cannot be read: No such file"),
        ({"key": "other_key"}, r"grpc\.certificate \S+, grpc\.key \S+: they do not belong together"),
        ({"certificate": "text"}, r"grpc\.certificate \S+, grpc\.key \S+: these are no certificate and key in PEM"),
        ({"key": "text"}, r"grpc\.certificate \S+, grpc\.key \S+: these are no certificate and key in PEM"),
        ({"client_ca": "text"}, r"grpc\.client_ca: \S+ has no certificate in PEM"),
        ({"client_ca": "key"}, r"grpc\.client_ca: \S+ has no certificate in PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tls: dict[str, str], files: dict[str, str], why: str):
    options = {"certificate": "certificate", "key": "key", "client_ca": "ca"} | files
    with pytest.raises(InvalidArgument, match=why) as caught:
        read_credentials(grpc(**{option: tls[name] for option, name in options.items()}).grpc)
    assert "\n" not in str(caught.value)


def test_a_key_with_a_passphrase_is_refused(tls: dict[str, str], tmp_path: Path):
    key = serialization.load_pem_private_key(Path(tls["key"]).read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "encrypted").write_bytes(encrypted)
    with pytest.raises(InvalidArgument, match="in PEM, the key without a passphrase"):
        read_credentials(GrpcConfig(certificate=tls["certificate"], key=str(tmp_path / "encrypted")))
