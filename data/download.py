"""Fetches one file over HTTP, and verifies what arrived."""

import hashlib
import http.client
import shutil
import urllib.request
from pathlib import Path

from tqdm import tqdm

from data import DataError
from data.durable import replaced


def download(url: str, path: Path, md5: str, *, timeout: float = 30.0) -> None:
    """Make path the file at url, with the given checksum.

    A file that is there already with the right checksum is kept, and nothing is fetched.

    Args:
        url: http or https.
        path: of the file; its directory must exist.
        md5: of the whole file, in hexadecimal.
        timeout: seconds without an answer before giving up.

    Raises:
        DataError: another file at path; no such directory; the server refuses or stops; a checksum that differs. Nothing is left
            of what arrived.
    """
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{url}: not an http or https address")
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such directory")
    if path.exists():
        if (found := md5_of(path)) != md5:
            raise DataError(
                f"{path}: there already, with md5 {found} instead of {md5}; move it away or delete it"
            )
        return
    with replaced(path) as draft:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response, open(draft, "wb") as file:
                length = response.headers.get("Content-Length")
                bar = {
                    "total": length and int(length),
                    "desc": path.stem,
                    "disable": None,
                }  # no bar but on a terminal
                with tqdm.wrapattr(response, "read", **bar) as body:
                    shutil.copyfileobj(body, file)
                # a connection that breaks off ends the stream without an error
                if length and file.tell() != int(length):
                    raise http.client.HTTPException(f"the connection ended before {length} bytes")
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{url}: not fetched: {error}") from error
        if (found := md5_of(draft)) != md5:
            raise DataError(f"{url}: md5 {found} of what arrived is not {md5}; it was deleted")


def md5_of(path: Path) -> str:
    """MD5 of a file, in hexadecimal: against damage, as publishers state it, not against malice."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
