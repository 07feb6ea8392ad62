"""Files that another user of the machine puts into a shared folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from fednotes.core import store
from fednotes.core.errors import FednotesError
from fednotes.core.types import Document
from fednotes.data.notes import Note
from fednotes.encoders.token_cache import tokenize_with_cache
from fednotes.jobs.prediction_files import write_brat

OTHER = os.geteuid() + 1


@pytest.fixture(params=[0o1777, 0o2775, 0o775], ids=oct)
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder in which everybody may write, like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(request.param)
    return folder


@pytest.fixture
def another_user() -> Iterator[None]:
    """Let all that this test makes, other than folders, belong to another user."""
    lstat = os.lstat

    def of_another(path: str | Path) -> os.stat_result:
        status = lstat(path)
        if stat.S_ISDIR(status.st_mode):
            return status
        return os.stat_result((*status[:4], OTHER, *status[5:10]))

    with (
        mock.patch("os.lstat", of_another),
        mock.patch.object(Path, "lstat", of_another),
    ):
        yield


@pytest.mark.usefixtures("another_user")
@pytest.mark.parametrize("target", ["file", "not yet"])
def test_a_link_of_another_user_is_not_followed(
    target: str, shared: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    if target == "file":
        mine.write_text("precious")
    (shared / "out").symlink_to(mine)

    with pytest.raises(
        FednotesError, match="another user of this machine has put a link there"
    ):
        store.write_out(shared / "out", "text")

    assert mine.exists() == (target == "file")
    assert target != "file" or mine.read_text() == "precious"


@pytest.mark.usefixtures("another_user")
def test_nothing_is_written_into_a_fifo_of_another_user(shared: Path) -> None:
    pipe = shared / "out"
    os.mkfifo(pipe, 0o666)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(
            FednotesError, match="another user of this machine has put a FIFO"
        ):
            store.write_out(pipe, "text of a note")
        assert os.read(reader, 100) == b""  # nobody has it open for writing
    finally:
        os.close(reader)


def test_a_link_in_a_folder_of_the_same_user_is_followed(tmp_path: Path) -> None:
    """Nobody else can have put it there, so it does not matter whose it is."""
    (tmp_path / "out").symlink_to(tmp_path / "real")
    tmp_path.chmod(0o755)
    store.write_out(tmp_path / "out", "text")
    assert (tmp_path / "real").read_text() == "text"


@pytest.mark.usefixtures("another_user")
def test_the_permissions_of_another_users_file_are_not_copied_to_the_new_file(
    shared: Path,
) -> None:
    path = shared / "out"
    path.write_text("old")
    path.chmod(0o666)
    mask = os.umask(0o077)
    try:
        store.write_out(path, "text of a note")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "text of a note"


def test_a_link_to_stdout_writes_to_stdout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to("/dev/stdout")
    store.write_out(tmp_path / "out", "text")
    assert capfd.readouterr().out == "text"


def test_a_lock_that_is_a_hard_link_is_refused_and_its_file_is_unchanged(
    tmp_path: Path,
) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("precious")
    run.mkdir()
    os.link(mine, run / store.LOCK)
    with (
        pytest.raises(FednotesError, match="is a hard link to another file"),
        store.reserving_folder(run),
    ):
        pass
    assert mine.read_text() == "precious"


def test_a_lock_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / store.LOCK)
    with (
        pytest.raises(FednotesError, match="cannot be written"),
        store.reserving_folder(tmp_path),
    ):
        pass


def test_a_folder_of_another_user_is_refused_with_a_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with (
        mock.patch.object(Path, "chmod", side_effect=PermissionError),
        pytest.raises(
            FednotesError,
            match=r"belongs to another user .*: use a folder that you own",
        ),
    ):
        store.make_private(tmp_path)


@pytest.mark.usefixtures("another_user")
@pytest.mark.parametrize(
    "use",
    [
        store.create_private_folder,
        lambda folder: store.write_text(folder / "state.json", "{}"),
        lambda folder: ExitStack().enter_context(store.reserving_folder(folder)),
        lambda folder: write_brat([Document("a", "She coughs.", ())], folder),
    ],
    ids=["create", "write a file", "reserve", "write brat"],
)
def test_a_folder_behind_a_link_of_another_user_is_unchanged(
    use: Callable[[Path], object], shared: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.ann").write_text("precious")
    (shared / "run").symlink_to(mine)
    with pytest.raises(
        (FednotesError, PermissionError),
        match="another user of this machine has put a link",
    ):
        use(shared / "run")
    assert [path.name for path in mine.iterdir()] == ["a.ann"]
    assert (mine / "a.ann").read_text() == "precious"


@pytest.mark.usefixtures("another_user")
def test_brat_files_do_not_follow_a_link_of_another_user_in_the_folder(
    tmp_path: Path,
) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    out.mkdir()
    (mine / "a.ann").write_text("precious")
    (out / "ward").symlink_to(mine)
    with pytest.raises(FednotesError, match=r"another user .* put a link at .*ward"):
        write_brat([Document("ward/a", "She coughs.", ())], out)
    assert [path.name for path in mine.iterdir()] == ["a.ann"]
    assert (mine / "a.ann").read_text() == "precious"


@pytest.mark.usefixtures("another_user")
def test_a_folder_above_may_be_a_link_of_another_user(
    shared: Path, tmp_path: Path
) -> None:
    """A colleague may keep a project elsewhere."""
    (tmp_path / "project").mkdir()
    (shared / "project").symlink_to(tmp_path / "project")
    store.create_private_folder(shared / "project" / "runs" / "first")
    folder = tmp_path / "project" / "runs" / "first"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o733, 0o777])
def test_a_folder_of_another_user_is_refused_whatever_its_permissions(
    mode: int, tmp_path: Path
) -> None:
    """Its owner can change them at any time."""
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    status = folder.stat()
    theirs = os.stat_result((*status[:4], OTHER, *status[5:10]))
    with (
        mock.patch("os.geteuid", return_value=OTHER + 1),
        mock.patch.object(Path, "stat", return_value=theirs),
        pytest.raises(FednotesError, match="belongs to another user"),
    ):
        store.make_private(folder)


def test_a_folder_that_cannot_be_listed_does_not_pass_as_private(
    tmp_path: Path,
) -> None:
    with (
        mock.patch("os.scandir", side_effect=PermissionError),
        pytest.raises(PermissionError),
    ):
        store.make_private(tmp_path)


def test_nothing_is_written_to_a_cache_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    tokenize = mock.Mock()
    with (
        mock.patch.object(Path, "chmod", side_effect=PermissionError),
        pytest.raises(FednotesError, match="belongs to another user"),
    ):
        tokenize_with_cache(
            lambda: [Note("0", "She coughs.", None, None, "s")],
            tokenize,
            fingerprint="f",
            vocabulary=1,
            folder=tmp_path,
        )
    tokenize.assert_not_called()


def test_a_folder_behind_a_link_is_made_private_or_refused(tmp_path: Path) -> None:
    """Another user may put a link to their own folder at the path of a run, and change
    its files."""
    (tmp_path / "folder").mkdir(mode=0o777)
    (tmp_path / "folder").chmod(0o777)
    (tmp_path / "run").symlink_to(tmp_path / "folder")
    with (
        mock.patch.object(Path, "chmod", side_effect=PermissionError),
        pytest.raises(FednotesError, match="run: belongs to another user"),
    ):
        store.make_private(tmp_path / "run")
    store.make_private(tmp_path / "run")
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_files_that_were_open_to_others_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "a").chmod(0o646)
    (tmp_path / "b").touch()
    (tmp_path / "b").chmod(0o600)
    tmp_path.chmod(0o755)
    assert store.make_private(tmp_path) == {tmp_path: 0o755, tmp_path / "a": 0o646}
    assert store.make_private(tmp_path) == {}
