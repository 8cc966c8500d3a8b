"""The conversation of docs/grpc.md takes place with two silos, message by message, and credit is charged as the page
says."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf import json_format

from headrace.proto.v1 import consumer_pb2 as pb
from headrace.server.config import GrpcConfig
from headrace.silo.config import ClusterConfig, ProviderConfig, SiloConfig
from headrace.silo.host import Silo
from headrace.silo.services import reports
from headrace.streams.frames import BATCHES, elements
from tests.silo.services.calling import Caller, Stream, batch, connecting, opened
from tests.silo.services.sessions import PATIENCE_S, SUBSCRIBE, Session, defined

REPOSITORY = Path(__file__).parents[3]
TEXT = (REPOSITORY / "docs" / "grpc.md").read_text()
MESSAGES = [
    (int(number), sender, receiver, text)
    for number, sender, receiver, text in re.findall(
        r"^(\d+)\. \*\*(The consumer|A|B) to (the consumer|A|B)\.\*\*.*?```json\n(.*?)```",
        TEXT,
        re.MULTILINE | re.DOTALL,
    )
]
ADDRESSES = {"A": "10.0.0.7:9465", "B": "10.0.0.8:9465"}


class Conversation:
    """Sends the consumer's messages as they are written, and waits for those of the silos."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        """Those that are written, and the real ones."""
        self._streams: dict[str, Stream] = {}
        self._heard: dict[str, pb.SubscribeResponse] = {}
        """Parts of responses of each silo that no written message has yet."""

    def begin(self, silo: str, caller: Caller) -> None:
        """Open a call to a silo, instead of an earlier one."""
        self._streams[silo] = caller.stream(SUBSCRIBE)
        self._heard[silo] = pb.SubscribeResponse()

    async def play(self, sender: str, receiver: str, text: str) -> None:
        if sender == "The consumer":
            await self._streams[receiver].write(json_format.Parse(text, pb.SubscribeRequest()))
            return
        json_format.Parse(text, pb.SubscribeResponse())  # it has no unknown fields
        for written, real in self.addresses.items():
            text = text.replace(written, real)
        async with asyncio.timeout(PATIENCE_S):
            while not self._has_come(sender, json.loads(text)):
                response = await self._streams[sender].read(pb.SubscribeResponse)
                assert response is not None, f"{sender} ended the call before {text}"
                if response.HasField("placement"):  # replaces the one before
                    self._heard[sender].ClearField("placement")
                self._heard[sender].MergeFrom(response)

    def _has_come(self, silo: str, written: Mapping[str, Any]) -> bool:
        """Whether everything that is written has come. Then it is taken."""
        heard: Any = self._heard[silo]
        found: list[tuple[str, int | None]] = []
        for field, value in written.items():
            if not isinstance(value, list):
                if not _is_part(value, _as_json(getattr(heard, field))):
                    return False
                found.append((field, None))
                continue
            places = iter([(place, _as_json(each)) for place, each in enumerate(getattr(heard, field))])
            for each in cast(list[Any], value):  # in the order in which they are written
                place = next((place for place, other in places if _is_part(each, other)), None)
                if place is None:
                    return False
                found.append((field, place))
        for field, place in reversed(found):
            if place is None:
                heard.ClearField(field)
            else:
                del getattr(heard, field)[place]
        return True


def _as_json(message: Any) -> Any:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _is_part(written: Any, heard: Any) -> bool:
    """Whether `heard` has all that is written, perhaps with more fields."""
    if isinstance(written, dict):
        fields = cast(dict[str, Any], written)
        return all(key in heard and _is_part(value, heard[key]) for key, value in fields.items())
    if isinstance(written, list):
        elements_ = cast(list[Any], written)
        return len(elements_) == len(heard) and all(map(_is_part, elements_, heard))
    return written == heard


def silo_config(data: Path, name: str) -> SiloConfig:
    return SiloConfig(
        data=str(data),
        grpc=GrpcConfig(port=0),
        cluster=ClusterConfig(name=name, period_s=0.1, lease_s=5, dead_after_s=2, maturity_s=0.2),
        providers={"default": ProviderConfig(queues=2)},
    )


async def publish(caller: Caller) -> None:
    await caller.publish(batch("orders/6", b"placed", b"paid"))
    await caller.publish(batch("orders/6", b"packed", b"sent"))


async def test_the_conversation_takes_place_as_it_is_written(tmp_path: Path) -> None:
    assert [number for number, *_ in MESSAGES] == list(range(1, 13))
    conversation = Conversation()
    async with AsyncExitStack() as stack:

        async def start(name: str) -> None:
            """Start a silo, and open a call to it."""
            silo = await stack.enter_async_context(Silo.opened(silo_config(tmp_path, name)))
            address = silo.grpc_address or ""
            conversation.addresses[ADDRESSES[name]] = address
            callers[name] = await stack.enter_async_context(connecting(address))
            conversation.begin(name, callers[name])

        callers: dict[str, Caller] = {}
        await start("A")
        await publish(callers["A"])
        for number, sender, receiver, text in MESSAGES[:10]:
            if number == 6:
                await start("B")
            await conversation.play(sender, receiver, text)


async def test_the_conversation_takes_place_after_a_lost_connection(tmp_path: Path) -> None:
    conversation = Conversation()
    async with Silo.opened(silo_config(tmp_path, "A")) as silo:
        address = silo.grpc_address or ""
        conversation.addresses[ADDRESSES["A"]] = address
        async with connecting(address) as caller, connecting(address) as lost:
            await publish(caller)
            conversation.begin("A", lost)
            for _, sender, receiver, text in MESSAGES[:4]:
                await conversation.play(sender, receiver, text)
            await lost.channel.close()
            conversation.begin("A", caller)
            for _, sender, receiver, text in [*MESSAGES[:2], *MESSAGES[10:]]:
                await conversation.play(sender, receiver, text)


class RawStream(Stream):
    """Keeps the encoded responses."""

    def __init__(self, call: Any) -> None:
        super().__init__(call)
        self.messages: list[bytes] = []

    async def read(self, kind: type[Any]) -> Any:
        message = await self._call.read()
        self.messages.append(message)
        return kind.FromString(message)


@pytest.mark.parametrize("size", [40, 100, 16_000, 17_000, 300_000], ids=str)
async def test_a_batch_takes_as_much_credit_as_the_page_says(tmp_path: Path, size: int) -> None:
    async with opened(tmp_path) as silo, connecting(silo.grpc_address or "") as caller:
        await caller.publish(batch("n/1", bytes(size), b"second"))
        raw = RawStream(caller.channel.stream_stream(f"/{SUBSCRIBE}")())
        session = Session(raw)
        await session.say(open=pb.Open(definition=defined("s")), credit=pb.Credit(events=1000, bytes=1 << 20))
        await session.take(2)
        (delivered,) = [batch for message in raw.messages for batch in elements(message, BATCHES)[0]]
        nbytes = len(delivered)
        await session.say(reclaim=True)
        await session.until(lambda: bool(session.returned))
        (left,) = session.returned
        assert (left.events, left.bytes) == (998, (1 << 20) - nbytes - _more_bytes(nbytes))
        session.cancel()


def _more_bytes(nbytes: int) -> int:
    """As the table of the page says."""
    rows = re.findall(r"^\| (?:up to|[\d,]+ to) ([\d,]+) \| (\d) more \|$", TEXT, re.MULTILINE)
    assert [more for _, more in rows] == ["2", "3", "4"]
    return next(int(more) for limit, more in rows if nbytes <= int(limit.replace(",", "")))


async def test_the_batches_of_the_conversation_take_as_many_bytes_as_it_says() -> None:
    (delivered,) = [text for number, *_, text in MESSAGES if number == 3]
    response = json_format.Parse(delivered, pb.SubscribeResponse())
    assert isinstance(response, pb.SubscribeResponse)
    for each in response.batches:
        each.timestamps_us.append(0)  # the silo adds the time of publishing
        written = pb.SubscribeResponse(batches=[each]).ByteSize()
        offset = 3 if not each.offset else 0  # delivery appends an offset of 0, too
        assert f"{written + offset} bytes of credit" in TEXT.replace("\n   ", " ")


def test_code_is_generated_by_the_commands_that_are_shown(tmp_path: Path) -> None:
    (commands,) = re.findall(r"## Generate code\n.*?```sh\n(.*?)```", TEXT, re.DOTALL)
    protoc = f"{shlex.quote(sys.executable)} -m grpc_tools.protoc"
    commands = commands.replace("REPOSITORY", shlex.quote(str(REPOSITORY))).replace("protoc -I", f"{protoc} -I")
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "headrace/proto/v1/consumer_pb2.py").exists()


def test_the_limits_of_reports_are_those_of_the_code() -> None:
    for number, text in (
        (reports.MAX_ENTRIES, f"| {reports.MAX_ENTRIES:,}; all their `acknowledgements`"),
        (reports.MAX_REASON, f"cut after {reports.MAX_REASON:,} characters"),
        (reports.MAX_DELAY_MS, f"| `Rejection.delay_ms` | {reports.MAX_DELAY_MS:,.0f} "),
    ):
        assert text in TEXT, number
