"""Makes a variant of a wheelhouse: ``release_variant.py WHEELHOUSE NEW VERSION [FILE OLD NEW]``.

The variant has the same wheels but for the product's own: that one says VERSION, and in its file FILE the text OLD is
replaced by NEW. Hashes and records are made anew, so that it installs as a release does.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

OUR_WHEEL = "reverse_proxy-*.whl"
VERSION_FILE = "proxy/__init__.py"


def variant_of(wheel: Path, folder: Path, version: str, changes: list[tuple[str, str, str]]) -> Path:
    """The changed wheel in ``folder``. Raises ValueError when an old text is not in its file exactly once."""
    name, before, rest = wheel.name.split("-", 2)
    info_before, info = f"{name}-{before}.dist-info", f"{name}-{version}.dist-info"
    made = folder / f"{name}-{version}-{rest}"
    changes = [
        (VERSION_FILE, f'"{before}"', f'"{version}"'),
        (f"{info_before}/METADATA", f"\nVersion: {before}\n", f"\nVersion: {version}\n"),
        *changes,
    ]
    records = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for path in source.namelist():
            if path == f"{info_before}/RECORD":
                continue
            data = source.read(path)
            for _, old, new in [change for change in changes if change[0] == path]:
                data = _replaced(path, data, old, new)
            made_path = path.replace(info_before, info, 1)
            target.writestr(made_path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            records.append(f"{made_path},sha256={digest},{len(data)}\n")
        target.writestr(f"{info}/RECORD", "".join(records) + f"{info}/RECORD,,\n")
    return made


def _replaced(path: str, data: bytes, old: str, new: str) -> bytes:
    text = data.decode()
    if text.count(old) != 1:
        raise ValueError(f"{path}: {old!r} is there {text.count(old)} times; wanted once")
    return text.replace(old, new).encode()


def main() -> None:
    """The program."""
    source, target, version, *change = sys.argv[1:]
    changes = [(change[0], change[1], change[2])] if change else []
    for folder in filter(Path.is_dir, Path(source).iterdir()):
        made = Path(target) / folder.name
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(folder, made)
        (wheel,) = made.glob(OUR_WHEEL)
        new = variant_of(wheel, made, version, changes)
        wheel.unlink()
        requirements = made / "requirements.txt"
        text = requirements.read_text()
        digest = hashlib.sha256(new.read_bytes()).hexdigest()
        text, count = re.subn(
            r"(?m)^reverse[-_]proxy==.*(\\\n.*)*$", f"reverse-proxy=={version} --hash=sha256:{digest}", text
        )
        if count != 1:
            raise ValueError(f"{requirements}: {count} lines of reverse-proxy; wanted one")
        requirements.write_text(text)


if __name__ == "__main__":
    main()
