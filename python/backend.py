"""The build backend: a wheel is the package's files and three of metadata. Nothing but the standard library is needed."""

from __future__ import annotations

import base64
import hashlib
import io
import pathlib
import re
import tarfile
import zipfile
from typing import Any, Dict, Iterator, Optional, Tuple

_HERE = pathlib.Path(__file__).resolve().parent
_EPOCH = (1980, 1, 1, 0, 0, 0)


def _project() -> Dict[str, str]:
    """Name, version and the like. Python 3.9 has no parser of TOML, and this file has one form."""
    text = (_HERE / "pyproject.toml").read_text()
    return dict(re.findall(r'^([a-z-]+) = "([^"]*)"$', text.split("[project]")[1].split("\n[")[0], re.MULTILINE))


def _metadata(p: Dict[str, str]) -> str:
    return (f"Metadata-Version: 2.1\nName: {p['name']}\nVersion: {p['version']}\nSummary: {p['description']}\n"
            f"Requires-Python: {p['requires-python']}\nDescription-Content-Type: text/markdown\n\n{(_HERE / 'README.md').read_text()}")


def _package() -> Iterator[pathlib.Path]:
    for path in sorted((_HERE / "cuvmm").rglob("*")):
        if path.is_file() and path.suffix in (".py", ".typed"):
            yield path


def _wheel(directory: str, files: Iterator[Tuple[str, bytes]]) -> str:
    p = _project()
    info = f"{p['name']}-{p['version']}.dist-info"
    name = f"{p['name']}-{p['version']}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w", zipfile.ZIP_DEFLATED) as z:
        def add(path: str, content: bytes) -> None:
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr = 0o644 << 16
            z.writestr(entry, content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}\n")

        for path, content in files:
            add(path, content)
        add(f"{info}/METADATA", _metadata(p).encode())
        add(f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: cuvmm\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        record.append(f"{info}/RECORD,,\n")
        z.writestr(zipfile.ZipInfo(f"{info}/RECORD", _EPOCH), "".join(record))
    return name


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    return _wheel(wheel_directory, ((str(f.relative_to(_HERE)), f.read_bytes()) for f in _package()))


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    return _wheel(wheel_directory, iter([("cuvmm.pth", f"{_HERE}\n".encode())]))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    p = _project()
    base = f"{p['name']}-{p['version']}"
    with tarfile.open(pathlib.Path(sdist_directory) / f"{base}.tar.gz", "w:gz") as t:
        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(f"{base}/{name}")
            entry.size = len(content)
            t.addfile(entry, io.BytesIO(content))

        for f in [*_package(), _HERE / "pyproject.toml", _HERE / "backend.py", _HERE / "README.md"]:
            add(str(f.relative_to(_HERE)), f.read_bytes())
        add("PKG-INFO", _metadata(p).encode())
    return f"{base}.tar.gz"
