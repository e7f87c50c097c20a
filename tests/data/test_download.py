"""Downloads: the right bytes or none."""

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data import DataError
from data.download import download
from data.images import cifar10
from data.prepare import main

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; breaks off after `stop` bytes of a body, counts what is asked."""

    stop: int | None = None
    content = CONTENT
    asked = 0
    daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/archive"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.asked += 1
        if self.path != "/archive":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        self.wfile.write(server.content[: server.stop])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_whole_file_arrives_and_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    for _ in range(2):
        download(server.url, path, MD5)
        assert path.read_bytes() == CONTENT
    assert server.asked == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_download_that_breaks_off_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.stop = 400_000
    with pytest.raises(DataError, match="not fetched: the connection ended before 1024000 bytes"):
        download(server.url, tmp_path / "archive", MD5)
    assert not list(tmp_path.iterdir())


def test_a_wrong_checksum_is_refused_and_its_bytes_deleted(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"\0"
    found = hashlib.md5(server.content, usedforsecurity=False).hexdigest()
    with pytest.raises(DataError, match=f"md5 {found} of what arrived is not {MD5}"):
        download(server.url, tmp_path / "archive", MD5)
    assert not list(tmp_path.iterdir())


def test_another_file_in_the_place_is_not_touched(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_text("mine")
    with pytest.raises(DataError, match=f"archive: there already, with md5 .* instead of {MD5}"):
        download(server.url, path, MD5)
    assert path.read_text() == "mine"
    assert server.asked == 0


def test_no_server_and_no_such_page_are_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: not fetched: HTTP Error 404"):
        download(server.url.replace("archive", "absent"), tmp_path / "archive", MD5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(DataError, match=r"not fetched: .*refused"):
            download(f"http://127.0.0.1:{free.getsockname()[1]}/archive", tmp_path / "archive", MD5)
    with pytest.raises(DataError, match="not an http or https address"):
        download("file:///etc/hostname", tmp_path / "archive", MD5)
    with pytest.raises(DataError, match="nowhere: no such directory"):
        download(server.url, tmp_path / "nowhere" / "archive", MD5)
    assert not list(tmp_path.iterdir())


def test_prepare_downloads_beside_the_output_and_verifies(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["cifar10", "--download", "--url", server.url, "-o", str(tmp_path / "c.h5")]
    assert main(command) == 1
    assert f"is not {cifar10.MD5}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    # The right checksum for what is no archive: fetched, kept, and refused as a source.
    monkeypatch.setattr(cifar10, "MD5", MD5)
    assert main(command) == 1
    assert "cifar-10-binary.tar.gz: not a whole tar archive" in capsys.readouterr().err
    assert main(command) == 1
    assert server.asked == 2
