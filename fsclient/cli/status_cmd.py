"""`slicefs status`: a volume's settings, usage and sessions."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click

from fsclient.cli.options import META_WAIT_S
from fsclient.config import naming, open_store
from fsclient.sizes import format_size
from fsmeta.engine import Meta
from fsmeta.runtime import SystemRuntime


@click.command()
@click.argument("meta")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(meta: str, as_json: bool) -> None:
    """Show the volume in META: settings, usage, and who has it mounted."""
    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            report = _report(Meta(store, runtime, META_WAIT_S))
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)


def _report(meta: Meta) -> dict[str, Any]:
    usage = meta.statfs()
    settings = {name: v for name, v in meta.format._asdict().items() if name != "unknown"}
    sessions = [{"id": each.id, "beat": each.beat, **each.info} for each in meta.sessions()]
    return {"volume": settings, "usage": usage._asdict(), "sessions": sessions}


def _print(report: dict[str, Any]) -> None:
    volume, usage = report["volume"], report["usage"]
    limit = format_size(usage["space_limit"]) if usage["space_limit"] else "no limit"
    inodes = usage["inodes_limit"] or "no limit"
    click.echo(f"volume      {volume['name']} ({volume['uuid']})")
    click.echo(f"data        {volume['storage']} {volume['bucket']}")
    blocks = format_size(volume["block_bytes"])
    click.echo(f"blocks      {blocks}, compression {volume['compression']}")
    click.echo(f"used        {format_size(usage['space_used'])} of {limit}")
    click.echo(f"inodes      {usage['inodes_used']} of {inodes}")
    click.echo(f"sessions    {len(report['sessions'])}")
    for each in report["sessions"]:
        started = datetime.fromtimestamp(each.get("started", 0)).strftime("%Y-%m-%d %H:%M")
        where = f"{each.get('host')} pid {each.get('pid')}"
        click.echo(f"  {each['id']:>6}  {where}  {each.get('mountpoint')}  since {started}")
