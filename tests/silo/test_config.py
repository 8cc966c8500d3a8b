"""Configuration of a silo: file, variables, flags, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from headrace.silo.config import CacheConfig, HttpConfig, ProviderConfig, SiloConfig, load_config, unknown_variables
from headrace.streams import InvalidArgument

FULL = """
data = "data"
modules = ["shop.handlers", "shop.reports"]
drain_s = 3
log_level = "warning"

[http]
host = "0.0.0.0"
port = 9464

[providers.default]
adapter = "log"
queues = 4
options = { durability = "relaxed", retain_age_s = 86400 }
cache = { max_events = 1000, max_bytes = 1_000_000 }
detach_after_s = 1.5

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
        http=HttpConfig(host="0.0.0.0", port=9464),
        providers={
            "default": ProviderConfig(
                adapter="log",
                queues=4,
                options={"durability": "relaxed", "retain_age_s": 86400},
                cache=CacheConfig(max_events=1000, max_bytes=1_000_000),
                detach_after_s=1.5,
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
        ("PROVIDERS__DEFAULT__QUEUES", "16", default(queues=16)),
        ("PROVIDERS__DEFAULT__CACHE__MAX_BYTES", "9", default(cache=CacheConfig(max_bytes=9))),
        ("PROVIDERS__DEFAULT__OPTIONS__DURABILITY", "relaxed", default(options={"durability": "relaxed"})),
        ("PROVIDERS__DEFAULT__OPTIONS__RETAIN_AGE_S", "60", default(options={"retain_age_s": 60})),
        ("PROVIDERS__DEFAULT__OPTIONS__X", "false", default(options={"x": False})),
    ],
)
def test_a_variable_is_understood_as_its_option_is(tmp_path: Path, variable: str, text: str, expected: SiloConfig):
    assert load(tmp_path, "", {f"HEADRACE_{variable}": text}) == expected


def test_variables_of_other_programs_are_left_alone(tmp_path: Path):
    assert load(tmp_path, "", {"HEADRACE_INSTALL_SERVERS": "1", "HOME": "/", "HTTP__PORT": "3"}) == SiloConfig()


def test_a_variable_that_is_no_option_is_told_of():
    (line,) = unknown_variables({
        "HEADRACE_DTA": "d", "HEADRACE_DATA": "d", "HEADRACE_HTTP__PORT": "1", "HEADRACE_PROVIDER": "a",
        "HEADRACE_INSTALL_SERVERS": "1", "HOME": "/",
    })  # fmt: skip
    assert line.startswith("variable HEADRACE_DTA is no option and without effect: accepted are HEADRACE_DATA, ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 3", "FILE: unknown option prot: accepted at the top are data, modules, drain_s, log_level, http,"),
        ("[http]\nprot = 3", "FILE: unknown option http.prot: accepted there are host, port"),
        ("[providers.a.cache]\nmax = 3",
         "FILE: unknown option providers.a.cache.max: accepted there are max_events, max_bytes"),
        ("[providers.a]\nqueue = 3", "FILE: unknown option providers.a.queue: accepted there are adapter, queues, opt"),
        ("[providers.a]\nqueues = 'x'", "FILE: option providers.a.queues: Expected int | null, got str"),
        ("[providers.a]\nqueues = 0", "FILE: option providers.a.queues: Expected int >= 1"),
        ("[providers.a]\nqueues = true", "FILE: option providers.a.queues: Expected int | null, got bool"),
        ("[http]\nport = 65536", "FILE: option http.port: Expected int <= 65535"),
        ("http = 3", "FILE: option http is a table, not 3"),
        ("providers = []", "FILE: option providers is a table, not []"),
        ("modules = 'shop'", "FILE: option modules: Expected array, got str"),
        ("modules = [1]", "FILE: option modules: Expected str, got int"),
        ("log_level = 'loud'", "FILE: option log_level: Invalid enum value 'loud': accepted are debug, info, "),
        ("drain_s = -1", "FILE: option drain_s: Expected float >= 0.0"),
        ("x =", "FILE: not TOML: Invalid value (at end of document)"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, message: str):
    assert refusal(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HTTP__PROT", "3", "variable HEADRACE_HTTP__PROT: unknown option prot: accepted there are host, port"),
        ("HTTP__PORT", "x", "variable HEADRACE_HTTP__PORT: Expected int | null, got str"),
        ("HTTP__PORT__X", "1", "variable HEADRACE_HTTP__PORT__X: there is nothing below x"),
        ("PROVIDERS__A__X", "1", "variable HEADRACE_PROVIDERS__A__X: unknown option x: accepted there are adapter, "),
        ("DRAIN_S", "soon", "variable HEADRACE_DRAIN_S: Expected float, got str"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_variable_is_named(tmp_path: Path, variable: str, text: str, message: str):
    assert refusal(tmp_path, "", {f"HEADRACE_{variable}": text}).startswith(message)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "silo.toml").write_bytes(b"data = '\xff'")
    with pytest.raises(InvalidArgument, match="not UTF-8 at byte 8"):
        load_config(tmp_path / "silo.toml", {}, {})


def test_a_wrong_flag_is_refused(tmp_path: Path):
    with pytest.raises(InvalidArgument, match=r"configuration: option http\.port: Expected"):
        load(tmp_path, "", {}, {"http": {"port": -1}})
