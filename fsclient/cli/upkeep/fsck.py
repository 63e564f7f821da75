"""`slicefs fsck`: metadata true to itself, and every object there and right."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import click

from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.options import META_WAIT_S, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.upkeep.scrub import FOUND, Request, examine_data
from fsclient.upkeep.verify_backups import verify_backups
from fsclient.upkeep.verify_objects import Naming, verify_objects
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import open_objects, stacked, stored_key
from fsclient.volume.paths import path_of
from fsmeta.check.check import Examination
from fsmeta.check.findings import KEPT_MAX
from fsmeta.check.repair import repair
from fsmeta.errors import Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.store.contract import Store
from fsmeta.store.url import shown_url
from fsmeta.types import Ino, SliceId

_SHOWN_MAX: Final = 100


@click.command()
@click.argument("meta")
@click.option("--data", is_flag=True, help="Read every object and verify its checksums, too.")
@click.option("--repair", "mend", is_flag=True, help="Mend the metadata where that is safe.")
@store_option
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fsck(
    meta: str,
    data: bool,
    mend: bool,
    store_options: tuple[str, ...],
    encrypt_rsa_key: str | None,
    encrypt_passphrase: bool,
    as_json: bool,
) -> int:
    """Check the volume in META. Exit code 0: clean, 3: problems were found.

    On a volume in use, what changes during the check may be reported as a problem. Of an encrypted
    volume the checksums can be verified without its key. --repair wants a volume that nobody uses.
    """
    offer = offered(encrypt_rsa_key, encrypt_passphrase)
    try:
        repaired = _repair(meta) if mend else []
        report = _examine(meta, store_options, mend)
        report = report._replace(repaired=[*repaired, *report.repaired])
        if data:
            read = examine_data(meta, Request(store_options, offer), SystemRuntime())
            wrong = [str(each) for each in read.problems if each.what == "damaged"]
            report = report.with_problems(wrong, len(wrong))
    except Corrupt as error:  # the settings themselves, or what leads to everything else
        click.echo(f"slicefs: {error}", file=sys.stderr)
        return FOUND
    if as_json:
        click.echo(json.dumps(report._asdict(), indent=2))
    else:
        _print(report, meta)
    return FOUND if report.problem_count else 0


class _Report(NamedTuple):
    inodes: int
    slices: int
    objects: int
    leaked_objects: int
    problems: list[str]  # the first KEPT_MAX
    problem_count: int
    repaired: Sequence[str] = ()  # what was mended before
    unfinished_backups: int = 0

    def with_problems(self, more: list[str], count: int) -> _Report:
        """This with further problems, of which `more` were kept."""
        kept = [*self.problems, *more][:KEPT_MAX]
        return self._replace(problems=kept, problem_count=self.problem_count + count)


def _examine(meta: str, store_options: tuple[str, ...], mend: bool) -> _Report:
    """Metadata first, then the objects that it names, and the backups."""
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            settings = Meta(store, runtime, META_WAIT_S).format
        overrides = parse_options(settings.storage, store_options)
        with Examination(store, line.show) as examination:
            found = examination.run()
            raw = open_objects(settings, runtime, overrides)
            objects = stacked(raw, settings.storage, runtime).store
            try:
                verdict = verify_objects(
                    objects,
                    settings.block_bytes,
                    examination,
                    False,
                    line.show,
                    naming=Naming(partial(stored_key, settings), _Paths(store, examination).of),
                )
                saved = verify_backups(objects, mend)
            finally:
                objects.close()
    finally:
        line.clear()
        store.close()
    report = _Report(
        found.inodes, found.slices, verdict.objects, verdict.leaked,
        [str(each) for each in found.problems], found.problem_count,
    )  # fmt: skip
    report = report._replace(unfinished_backups=saved.unfinished, repaired=saved.removed)
    report = report.with_problems(verdict.problems, verdict.problem_count)
    return report.with_problems(saved.problems, len(saved.problems))


class _Paths:
    """The files that slices belong to, as users name them."""

    def __init__(self, store: Store, examination: Examination) -> None:
        self._store = store
        self._notes = examination.notes
        self._found: dict[Ino, str] = {}

    def of(self, sid: SliceId) -> str:
        """A path; of many only the inode, for whoever looks at each."""
        ino = self._notes.user(sid)
        if ino is None:
            return ""
        if ino not in self._found and len(self._found) < _SHOWN_MAX:
            self._found[ino] = path_of(self._store, ino)
        return self._found.get(ino, f"inode {ino}")


def _repair(meta: str) -> list[str]:
    """What was mended. Raises: ConfigError where the volume is in use."""
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            opened = Meta(store, runtime, META_WAIT_S)
        done, _ = repair(opened, runtime.now_ns() // 10**9, line.show)
        store.sync()
        return done
    finally:
        line.clear()
        store.close()


def _print(report: _Report, meta: str) -> None:
    for line in report.repaired:
        click.echo(f"repaired: {line}")
    click.echo(f"{report.inodes} inodes, {report.slices} slices, {report.objects} objects")
    if report.leaked_objects:
        remedy = f"`slicefs gc --delete {shown_url(meta)}` removes them"
        click.echo(f"{report.leaked_objects} objects belong to nothing: {remedy}")
    if report.unfinished_backups:
        click.echo(f"{report.unfinished_backups} backups were not completed, or are being made")
    for problem in report.problems[:_SHOWN_MAX]:
        click.echo(f"problem: {problem}", file=sys.stderr)
    if report.problem_count > _SHOWN_MAX:
        click.echo(f"… and {report.problem_count - _SHOWN_MAX} more: see --json", file=sys.stderr)
    click.echo(f"{report.problem_count} problems" if report.problem_count else "clean")
