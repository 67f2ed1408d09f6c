#!/usr/bin/env python3
"""Checks licences, duplicate versions and sources of all dependencies against deny.toml, as cargo-deny does.

    tests/dependencies.py

`make lint` runs it where cargo-deny is not installed. It needs no network. Security advisories are checked by cargo-deny alone.
"""

import collections
import json
import re
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:
    sys.exit(print("skipped: licences and versions of dependencies: Python is older than 3.11"))

ROOT = Path(__file__).resolve().parent.parent
CRATES_IO = "registry+https://github.com/rust-lang/crates.io-index"


def is_allowed(licence, allowed):
    """Whether an SPDX expression can be satisfied by the allowed licences."""
    if licence is None:
        return False
    words = re.findall(r"[()]|[^\s()/]+|/", licence.replace(" WITH ", "-WITH-"))
    operators = {"AND": "and", "OR": "or", "/": "or", "(": "(", ")": ")"}
    return eval(" ".join(operators.get(word.upper(), str(word in allowed)) for word in words))


def main():
    policy = tomllib.loads((ROOT / "deny.toml").read_text())
    command = ["cargo", "metadata", "--format-version=1", "--all-features", "--locked"]
    packages = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)["packages"]
    dependencies = [package for package in packages if package["source"]]
    problems = []

    allowed = set(policy["licenses"]["allow"])
    clarified = {entry["crate"]: entry["expression"] for entry in policy["licenses"].get("clarify", [])}
    for package in dependencies:
        licence = package["license"] or clarified.get(f"{package['name']}@{package['version']}")
        if not is_allowed(licence, allowed):
            problems.append(f"{package['name']} {package['version']}: licence {licence} is not in deny.toml")
        if package["source"] != CRATES_IO:
            problems.append(f"{package['name']} {package['version']}: source {package['source']} is not crates.io")

    versions = collections.defaultdict(set)
    for package in dependencies:
        versions[package["name"]].add(package["version"])
    skipped = collections.defaultdict(set)
    for entry in policy["bans"].get("skip", []):
        name, _, version = entry["crate"].partition("@")
        skipped[name].add(version)
    for name, found in sorted(versions.items()):
        if len(found - skipped[name]) > 1:
            problems.append(f"{name}: {len(found)} versions ({', '.join(sorted(found))}); name the older in deny.toml's bans.skip")
        for version in sorted(skipped[name] - found):
            problems.append(f"{name} {version} is in deny.toml's bans.skip but not among the dependencies")
    for name in sorted(set(skipped) - set(versions)):
        problems.append(f"{name} is in deny.toml's bans.skip but not among the dependencies")

    for problem in problems:
        print(f"error: {problem}")
    print(f"{len(dependencies)} dependencies checked against deny.toml, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
