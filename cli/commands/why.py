"""`headrace why`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ...streams.identity import StreamId
from ...streams.wording import printable
from .help import SectionedCommand
from .options import ProviderPlace, SiloPlace, adapter_options, calling, opened, place_options
from .output import json_option, print_json
from .running import run

if TYPE_CHECKING:
    from ...silo.why_causes import Cause
    from ...silo.why_gathering import StreamExplanation

ANSWER_S = 10.0


@click.command("why", cls=SectionedCommand)
@place_options
@adapter_options
@click.argument("stream")
@click.option("--subscription", default="", metavar="NAME", help="Only for this one. Default: each that matches.")
@json_option
def command(*, place: ProviderPlace, stream: str, subscription: str, as_json: bool) -> None:
    """Say why the next event of STREAM (namespace/key) is not delivered.

    The answer has the causes that apply, the one that stops most first, each with its evidence and a remedy. It works
    while parts are down, and names only causes that it can see. With --data, the process that serves a subscription
    is not asked.
    """
    found = run(_explain(place, StreamId.parse(stream), subscription))
    if as_json:
        print_json([_document(one) for one in found])
        return
    for one in found:
        of = f", subscription {one.subscription}" if one.subscription else ""
        click.echo(printable(f"{stream}{of}"))
        for cause in one.causes:
            _print_cause(cause)


def _print_cause(cause: Cause) -> None:
    click.echo(f"  {cause.code}: {cause.meaning}")
    if cause.evidence:
        click.echo(f"    evidence: {printable(cause.evidence)}")
    click.echo(f"    do: {cause.remedy}")


def _document(one: StreamExplanation) -> dict[str, Any]:
    causes = [
        {"code": cause.code, "meaning": cause.meaning, "evidence": cause.evidence, "remedy": cause.remedy}
        for cause in one.causes
    ]
    return {"subscription": one.subscription or None, "causes": causes}


async def _explain(place: ProviderPlace, stream: StreamId, name: str) -> Sequence[StreamExplanation]:
    from ...silo.why_causes import Cause  # noqa: PLC0415 (not for --help)
    from ...silo.why_gathering import StreamExplanation, explain_stream  # noqa: PLC0415

    if not isinstance(place, SiloPlace):
        async with opened(place) as provider:
            return await explain_stream(provider, stream, name, is_asked=False)
    from ...proto.v1 import observation_pb2 as pb  # noqa: PLC0415 (only --server needs it)

    request = pb.ExplainStreamRequest(provider=place.provider, subscription=name)
    request.stream.namespace, request.stream.key = stream.namespace, stream.key
    async with calling(place, patient=False) as connection:
        answer = await connection.unary(
            "ObservationService/ExplainStream", request.SerializeToString(), timeout_s=ANSWER_S
        )
    return [
        StreamExplanation(one.subscription, [Cause(cause.code, cause.evidence) for cause in one.causes])
        for one in pb.ExplainStreamResponse.FromString(answer).explanations
    ]
