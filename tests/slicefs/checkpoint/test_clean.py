"""`slicefs ckpt clean` in a bucket: each run is listed once, and what was listed goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slicefs.lifecycle.clean import CleanPolicy, Doomed, judge, remove_runs
from slicefs.lifecycle.move import OpenTrees
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Entry, Tree
from tests.slicefs.checkpoint.test_lifecycle import ckpt
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind

RUN = ("config.yaml", "step0/model.pt", "wandb/debug.log", "wandb/é ü+&.json")
NAMES = "abcdef"
PAGE = 3  # keys


@pytest.fixture
def proxy(
    bucket_url: str, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HttpProxy]:
    """Stands before the bucket."""
    del bucket_url  # it has set the environment
    with HttpProxy(ceph.s3_port) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture
def runs(bucket_url: str) -> Iterator[Tree]:
    """Runs of which every second has a step."""
    tree = open_tree(bucket_url)
    for number, name in enumerate(NAMES):
        for file in (*RUN, *(("step7/model.pt",) if number % 2 else ())):
            tree.write_atomic(f"{name}/{file}", [b"x" * 10])
    yield tree
    tree.remove_tree("")
    tree.close()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page of a listing has a whole run."""
    monkeypatch.setattr("fsdata.objects.s3.s3.PAGE_KEYS", PAGE)


def left(tree: Tree) -> set[str]:
    """The runs that are there, each of them whole."""
    files = [info.path[0] for info in tree.list("")]
    for name in set(files):
        assert files.count(name) == len(RUN) + NAMES.index(name) % 2
    return set(files)


def test_each_run_is_listed_once_and_all_go_together(
    proxy: HttpProxy, runs: Tree, bucket_url: str
) -> None:
    before = len(proxy.requests())
    code, out, err = ckpt("clean", *(f"{bucket_url}/{name}" for name in NAMES))
    assert (code, err) == (0, "")
    assert "3 of 6 runs removed" in out
    methods = [request.method for request in proxy.requests()[before:]]
    assert sorted(methods) == ["GET"] * 6 + ["POST"]
    assert left(runs) == set("bdf")


@pytest.mark.usefixtures("small_pages")
def test_runs_of_many_pages(runs: Tree, bucket_url: str) -> None:
    code, out, err = ckpt("clean", "--json", *(f"{bucket_url}/{name}" for name in NAMES))
    assert (code, err) == (0, "")
    assert out.count('"remove"') == out.count('"keep"') == 3
    assert left(runs) == set("bdf")


@pytest.mark.usefixtures("small_pages")
def test_names_in_a_directory_of_many_pages(runs: Tree) -> None:
    assert list(runs.list_dir("")) == [Entry(name, True) for name in NAMES]
    wanted = [
        Entry("config.yaml", False, 10),
        *(Entry(x, True) for x in ("step0", "step7", "wandb")),
    ]
    assert list(runs.list_dir("b")) == wanted
    assert [each.name for each in runs.list_dir("b/wandb")] == ["debug.log", "é ü+&.json"]
    assert list(runs.list_dir("none")) == []


def test_what_comes_after_the_listing_stays(runs: Tree, bucket_url: str) -> None:
    with OpenTrees() as stores:
        run = stores.endpoint(f"{bucket_url}/a")
        verdict = judge(run, CleanPolicy())
        runs.write_atomic("a/step9/model.pt", [b"new"])
        assert remove_runs([Doomed("a", run, verdict)], 4) == {}
    assert [info.path for info in runs.list("a/")] == ["a/step9/model.pt"]


def test_a_request_that_is_refused_is_one_for_each_run_then(
    proxy: HttpProxy, runs: Tree, bucket_url: str
) -> None:
    proxy.add(Fault(Kind.STATUS, 2, "POST", status=409, code="InvalidRequest"))
    code, out, _ = ckpt("clean", *(f"{bucket_url}/{name}" for name in NAMES))
    assert code == 1
    assert "2 of 6 runs removed" in out
    stays = left(runs) - set("bdf")
    assert len(stays) == 1
    assert f"failed   {bucket_url}/{stays.pop()}" in out
