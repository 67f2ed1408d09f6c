"""Checks this Python and this machine: ``python -m flexring.doctor``. Its arguments are those of ``flexring doctor``.

Must not import torch: it reports the version that is installed, also of one that cannot be imported.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from . import __version__, library_path, version


def command() -> str | None:
    """The path of the ``flexring`` command that belongs to this package, else of the one in PATH; None without one."""
    package = Path(__file__).resolve().parent
    schemes = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")]
    # A checkout, an environment, the user's folder, and that of `pip install --target`.
    folders = [package.parents[1] / "target" / "release", *map(Path, schemes), package.parent / "bin"]
    found = (str(folder / "flexring") for folder in folders if (folder / "flexring").is_file())
    return next(found, None) or shutil.which("flexring")


def main() -> int:
    """Prints what concerns Python, then becomes the command. Returns the exit code if there is no command."""
    # The command prints one JSON value.
    if "--json" not in sys.argv:
        for name, text in _about_python():
            print(f"{name:<10} {text}")
        sys.stdout.flush()
    path = command()
    if path is None:
        print("no flexring command in this environment or PATH: fix: `pip install .` in flexring's checkout", file=sys.stderr)
        return 1
    os.execv(path, ["flexring", "doctor", *sys.argv[1:]])


def _about_python() -> list[tuple[str, str]]:
    loaded = ".".join(map(str, version()))
    library = f"{loaded}, {library_path()}"
    if loaded != __version__:
        library += f" (the package is {__version__}: fix: install both from one checkout, unset FLEXRING_LIBRARY)"
    rows = [("python", f"{platform.python_version()}, {sys.executable}"), ("library", library)]
    for module in ("numpy", "torch"):
        try:
            rows.append((module, metadata.version(module)))
        except metadata.PackageNotFoundError:
            rows.append((module, "not installed (optional)"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
