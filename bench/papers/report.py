#!/usr/bin/env python3
"""Writes the papers' examples as tables and pictures: the cost model and the simulator beside what the papers state.

    cargo bench --bench papers > papers.json
    bench/papers/report.py papers.json [--out FOLDER]

Writes papers.md into FOLDER (bench/results), and the pictures and the numbers into FOLDER/papers. Without matplotlib there are no
pictures.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flexreduce
import pfn
import ueno_yokota
import yuan
from common import ROOT
from pictures import Pictures

HEAD = """# The papers again

What four papers report, beside flexring's cost model (`crates/flexring-simulator/src/cost_model/`: the papers' equations) and its simulator (the programs that
ranks run, in virtual time). `make bench-papers` writes this file; the numbers are in [papers/papers.json](papers/papers.json), and what
the papers state, with its place, in `bench/papers/data.toml`. It is taken from their text and tables; nothing is read from
their plots. In the simulations additions take no time, because the papers' models hide them, and transfers that share a link share its bandwidth.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="output of cargo bench --bench papers")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    papers = tomllib.loads((Path(__file__).parent / "data.toml").read_text())
    folder = arguments.out / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        pictures = Pictures(folder)
    except ImportError:
        pictures = None
        print("skipped: pictures: no matplotlib (Debian: python3-matplotlib)")
    parts = [HEAD]
    skipped = [f"{size['processes']:,}" for size in results["ueno_yokota"]["sizes"] if size["ring"]["simulation"] is None]
    if skipped:
        parts.append(f"Not simulated, because it takes minutes: {', '.join(skipped)} processes (`cargo bench --bench papers -- 2048`).\n")
    for section in (ueno_yokota, flexreduce, yuan, pfn):
        found, stated = results[section.NAME], papers[section.NAME]
        parts.append(section.markdown(found, stated))
        if pictures and section.PICTURE:
            parts.append(f"![{section.PICTURE}](papers/{section.PICTURE})\n")
            section.draw(found, stated, pictures)
    (folder / "papers.json").write_text(json.dumps(results, indent=1) + "\n")
    (arguments.out / "papers.md").write_text("\n".join(parts))
    print(arguments.out / "papers.md")


if __name__ == "__main__":
    main()
