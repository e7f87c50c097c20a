"""Fetch one file over HTTP, resuming where an earlier attempt stopped, and verify what arrived."""

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from data import DataError

CHUNK_BYTES = 1 << 18


def download(url: str, path: Path, md5: str, *, timeout: float = 30.0) -> None:
    """Make path the file at url, with the given checksum.

    What has arrived is kept in `path.part`, and the next call asks the server for the rest only. A file that
    is there already with the right checksum is kept, and nothing is fetched.

    Args:
        url: http or https.
        path: of the file; its directory must exist.
        md5: of the whole file, in hexadecimal.
        timeout: seconds without an answer before giving up.

    Raises:
        DataError: another file at path; no such directory; the server refuses or stops (call again to
            resume); a checksum that differs, for which the part is deleted.
    """
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{url}: not an http or https address")
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such directory")
    if path.exists():
        found = md5_of(path)
        if found != md5:
            raise DataError(
                f"{path}: there already, with md5 {found} instead of {md5}; move it away or delete it"
            )
        return
    part = path.with_name(path.name + ".part")
    try:
        fetch_rest(url, part, timeout)
    except (OSError, http.client.HTTPException) as error:
        arrived = part.stat().st_size if part.exists() else 0
        resumes = f"; {arrived} bytes are in {part}, the same command resumes" if arrived else ""
        raise DataError(f"{url}: not fetched: {error}{resumes}") from error
    found = md5_of(part)
    if found != md5:
        part.unlink()
        raise DataError(f"{url}: md5 {found} of what arrived is not {md5}; it was deleted")
    part.replace(path)


def fetch_rest(url: str, part: Path, timeout: float) -> None:
    """Append to part what it lacks of url, or write it anew where the server cannot resume."""
    arrived = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={arrived}-"} if arrived else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        # The range starts at or after the end: the part is whole (or wrong), which its checksum tells.
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and arrived:
            return
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            arrived = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {arrived}-"):
            raise http.client.HTTPException(
                f"the server sent {response.headers.get('Content-Range')!r} for {arrived}-"
            )
        length = response.headers.get("Content-Length")
        total = arrived + int(length) if length else None
        # disable=None: no bar where the output is not a terminal.
        bar = tqdm(total=total, initial=arrived, unit="B", unit_scale=True, desc=part.stem, disable=None)
        with open(part, "ab" if arrived else "wb") as file, bar:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
            arrived = file.tell()
    # A connection that breaks off ends the stream without an error.
    if total is not None and arrived != total:
        raise http.client.HTTPException(f"the connection ended before {total} bytes")


def md5_of(path: Path) -> str:
    """MD5 of a file, in hexadecimal: against damage, as publishers state it, not against malice."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
