"""The runtime folder: only this user's, and what is found in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_reshard.errors import ProtocolError
from elastic_reshard.protocol.places import (
    Place,
    base_url,
    job_folder,
    place_of,
    runtime_folder,
    take_back,
    write_private,
)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_RESHARD_RUNTIME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_folder() == tmp_path / f"elastic_reshard-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert runtime_folder() == tmp_path / "xdg" / "elastic_reshard"
    monkeypatch.setenv("ELASTIC_RESHARD_RUNTIME", str(tmp_path / "given"))
    assert job_folder("j") == tmp_path / "given" / "j"
    assert runtime_folder(tmp_path / "mine") == tmp_path / "mine"
    for folder in ("xdg/elastic_reshard", "given", "given/j", "mine"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for bad in ("open", "link"):
        with pytest.raises(ProtocolError, match="is a link, another user's or open to others"):
            runtime_folder(tmp_path / bad)
    with pytest.raises(ProtocolError, match="cannot be made"):
        runtime_folder(tmp_path / "file" / "below")


def test_only_what_one_has_written_is_taken_back(tmp_path: Path) -> None:
    mine = write_private(tmp_path / "url", "same")
    theirs = write_private(tmp_path / "url", "same")
    take_back(tmp_path / "url", mine)
    assert (tmp_path / "url").read_text() == "same"
    take_back(tmp_path / "url", theirs)
    take_back(tmp_path / "url", theirs)
    assert list(tmp_path.iterdir()) == []


def test_supervisors_are_found_by_url_or_job(tmp_path: Path) -> None:
    assert place_of(runtime=tmp_path / "run") is None
    for job, url, token in (("a", "http://127.0.0.1:1", "s3cret"), ("b", "http://127.0.0.1:2", None)):
        write_private(job_folder(job, tmp_path / "run") / "url", url)
        if token is not None:
            write_private(job_folder(job, tmp_path / "run") / "token", token)
        if job == "a":
            assert place_of(runtime=tmp_path / "run") == Place("a", url, "s3cret")
    job_folder("c", tmp_path / "run")
    assert (tmp_path / "run" / "a" / "token").stat().st_mode & 0o777 == 0o600
    assert place_of("127.0.0.1:1", runtime=tmp_path / "run") == Place("a", "http://127.0.0.1:1", "s3cret")
    assert place_of(job="b", runtime=tmp_path / "run") == Place("b", "http://127.0.0.1:2", "")
    assert place_of("127.0.0.1:3", runtime=tmp_path / "run") is None
    with pytest.raises(ProtocolError, match="several supervisors are written down: a at http"):
        place_of(runtime=tmp_path / "run")


def test_urls() -> None:
    for url in ("10.0.0.1:29700", "http://10.0.0.1:29700", "http://10.0.0.1:29700/"):
        assert base_url(url) == "http://10.0.0.1:29700"
    assert base_url("[::1]:80") == "http://[::1]:80"
    for bad in ("", "host", "http://host", "ftp://host:1", "host:99999", "host:x", "http://host:1/path", "://"):
        with pytest.raises(ProtocolError):
            base_url(bad)
