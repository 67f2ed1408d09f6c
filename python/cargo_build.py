"""Builds the shared library and the command with cargo, and adds both to the wheel. Hatchling runs this (pyproject.toml).

Environment:

- ``FLEXRING_WHEEL_CARGO_ARGS``: arguments for ``cargo build``, such as ``--no-default-features``.
- ``FLEXRING_WHEEL_FROM``: a folder that has ``libflexring.so`` and ``flexring`` already, so that nothing is built.
"""

import json
import os
import platform
import shlex
import subprocess
from pathlib import Path

from elftools.elf.elffile import ELFFile
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Libraries that every Linux distribution has. A wheel whose library needs others runs where they are installed only.
BASE = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}


class CargoBuildHook(BuildHookInterface):
    """Adds what cargo builds, and names the platform after what the library needs."""

    def initialize(self, version, build_data):
        chosen = os.environ.get("FLEXRING_WHEEL_FROM")
        library, command = [Path(chosen, name) for name in ("libflexring.so", "flexring")] if chosen else self.build()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library)}"
        build_data["shared_scripts"][str(command)] = "flexring"
        # Without this, an editable installation uses the library in target/release.
        if version != "editable":
            build_data["force_include"][str(library)] = "flexring/libflexring.so"

    def build(self):
        """The paths of the shared library and of the command, from cargo's messages: the user's configuration of cargo may
        name other folders and targets."""
        command = ["cargo", "build", "--package=flexring-c", "--package=flexring-cli", "--release", "--locked"]
        command += ["--message-format=json-render-diagnostics"]
        command += shlex.split(os.environ.get("FLEXRING_WHEEL_CARGO_ARGS", ""))
        try:
            output = subprocess.run(command, cwd=self.root, stdout=subprocess.PIPE, check=True).stdout
        except FileNotFoundError:
            raise SystemExit("flexring is built with cargo, which is not in PATH: install Rust (https://rustup.rs)") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{shlex.join(command)} failed with exit code {error.returncode}") from None
        files = [Path(file) for line in output.splitlines() for file in json.loads(line).get("filenames", [])]
        return [next(file for file in reversed(files) if file.name == name) for name in ("libflexring.so", "flexring")]


def platform_tag(library):
    """``manylinux`` with the newest version of glibc that the library needs a symbol of; ``linux`` if it needs other libraries
    than those of glibc and the compiler."""
    with open(library, "rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        versions = elf.get_section_by_name(".gnu.version_r").iter_versions()
        names = [version.name for _, auxiliaries in versions for version in auxiliaries]
    others = {name for name in needed - BASE if not name.startswith("ld-linux")}
    if others:
        return f"linux_{platform.machine()}"
    minors = [int(name.split(".")[1]) for name in names if name.startswith("GLIBC_2.")]
    return f"manylinux_2_{max(minors)}_{platform.machine()}"
