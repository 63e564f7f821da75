"""`slicefs status`: a volume's settings, usage and sessions."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import click

from fsclient.background.quota_alerts import near_full
from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import META_WAIT_S
from fsclient.cli.options.tell import tell
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.quota_names import as_json, titles
from fsclient.volume.units import format_size
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime

NEAR_SHOWN_MAX: Final = 20  # quotas; --json and `slicefs quota list` have all


@click.command(
    epilog=examples(
        "slicefs status redis://localhost/1", "slicefs status --json redis://localhost/1"
    )
)
@click.argument("meta")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(meta: str, as_json: bool) -> None:
    """Show the volume in META: settings, usage, and the clients that have it mounted."""
    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            found = report(Meta(store, runtime, META_WAIT_S), runtime.now_ns())
    finally:
        store.close()
    if as_json:
        tell(found, meta=meta)
    else:
        _print(found)


def _print_quotas(quotas: dict[str, Any]) -> None:
    """How many, and which are nearly full."""
    near = sorted(quotas["near_full"], key=lambda each: -each["percent"])
    click.echo(f"quotas      {quotas['count']}, {len(near)} nearly full")
    for each in near[:NEAR_SHOWN_MAX]:
        name = (
            each.get("path") or f"{each['type']} {each['name'] or each.get('uid', each.get('gid'))}"
        )
        click.echo(f"  {each['percent']:>5.1f}%  {name}")


def report(meta: Meta, now_ns: int) -> dict[str, Any]:
    """What `status --json` prints."""
    usage = meta.statfs()
    settings = meta.format.shown()
    count, near = near_full(meta)
    names = titles(meta, [each.node for each in near])
    quotas = {"count": count, "near_full": [as_json(each, names[each.node]) for each in near]}
    review = meta.store.history.review()
    warnings = [review.refusal] if review.refusal else list(review.warnings)
    return {
        "volume": settings,
        "usage": usage._asdict(),
        "quotas": quotas,
        "sessions": _sessions(meta, now_ns),
        "warnings": warnings,
        "notes": list(review.notes),
    }


def _sessions(meta: Meta, now_ns: int) -> list[dict[str, Any]]:
    """The clients that have the volume mounted, their last heartbeat, and what they hold."""
    records = meta.sessions.all()
    has = meta.sessions.belongings([each.id for each in records])
    shown = []
    for each in records:
        age = max(0, now_ns - each.at_ns) / 1e9 if each.at_ns else None
        orphans, locks = has[each.id]
        of_files = [{"ino": ino, "kind": kind.name.lower()} for ino, kind in locks]
        holds = {"heartbeat_age_seconds": age, "open_orphans": orphans, "locks": of_files}
        shown.append({"id": each.id, "beat": each.beat, **each.info, **holds})
    return shown


def _print(report: dict[str, Any]) -> None:
    volume, usage = report["volume"], report["usage"]
    limit = format_size(usage["space_limit"]) if usage["space_limit"] else "no limit"
    inodes = usage["inodes_limit"] or "no limit"
    click.echo(f"volume      {volume['name']} ({volume['uuid']})")
    click.echo(f"data        {volume['storage']} {volume['bucket']}")
    blocks = format_size(volume["block_bytes"])
    click.echo(f"blocks      {blocks}, compression {volume['compression']}")
    if volume["encryption"]:
        wrapped = volume["encryption"]
        click.echo(f"encryption  {wrapped['cipher']}, key wrapped by {wrapped['wrap']}")
    days = volume["trash_days"]
    kept = f"{days} day{'' if days == 1 else 's'}" if days else "none"
    click.echo(f"trash       {kept}")
    click.echo(f"used        {format_size(usage['space_used'])} of {limit}")
    click.echo(f"inodes      {usage['inodes_used']} of {inodes}")
    _print_quotas(report["quotas"])
    for warning in report["warnings"]:
        click.echo(f"warning     {warning}")
    for note in report["notes"]:
        click.echo(f"note        {note}")
    click.echo(f"sessions    {len(report['sessions'])}")
    for each in report["sessions"]:
        where = f"{each.get('host')} pid {each.get('pid')}"
        what = each.get("mountpoint") or each.get("does") or "a program"  # of the Python library
        line = f"  {each['id']:>6}  {where}  {what}"
        if "started" in each:
            started = datetime.fromtimestamp(each["started"]).strftime("%Y-%m-%d %H:%M")
            line += f"  since {started}"
        click.echo(line + _holds(each))


def _holds(session: dict[str, Any]) -> str:
    """What else is worth a word on a session's line."""
    words = []
    age = session["heartbeat_age_seconds"]
    if age is not None:
        words.append(f"heard of {age:.0f} s ago")
    if session["locks"]:
        words.append(f"locks of {len({each['ino'] for each in session['locks']})} files")
    if session["open_orphans"]:
        words.append(f"{len(session['open_orphans'])} files open without a name")
    limits = session.get("limits")
    if limits:
        count = limits["open_files"]
        words.append(f"may open {'any number of' if count < 0 else count} files")
        if limits["oom_score_adj"]:
            words.append(f"OOM score {limits['oom_score_adj']:+d}")
    return "".join(f", {word}" for word in words)
