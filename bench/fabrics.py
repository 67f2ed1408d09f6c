"""Times an all-reduce on nodes that are cabled to each other, beside the least time that their links allow.

    bench/fabrics.py [--rate 100mbit] [--size 16M] [--program target/release/flexring]

Each fabric is a lab of network namespaces without a switch (bench/fabric_lab.sh), with a file that describes its links for
FLEXRING_TOPOLOGY. Needs root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from common import ROOT

FABRICS = {
    "torus of 2x3": ["0-1", "1-2", "2-0", "3-4", "4-5", "5-3", "0-3", "1-4", "2-5"],
    "ring of 6 with a broken link": ["0-1", "1-2", "2-3", "3-4", "4-5"],
}


def topology(links, rate):
    """The description of nodes of one rank each, with these links."""
    nodes = sorted({int(end) for link in links for end in link.split("-")})
    rate = rate.removesuffix("bit")
    text = "".join(f'[[node]]\nname = "n{node}"\nranks = [{node}]\n' for node in nodes)
    for one, other in (link.split("-") for link in links):
        text += f'[[link]]\nbetween = ["n{one}", "n{other}"]\nbandwidth = "{rate}"\nlatency = "20us"\n'
    return text


def inside(options):
    """Runs in the lab: prints the times of the job as JSON."""
    import lab

    settings = {"FLEXRING_TOPOLOGY": options["topology"], "FLEXRING_TRANSPORT": "tcp"}
    arguments = ["-b", options["size"], "-e", options["size"], "-n", "5", "-w", "2", *options["algorithm"]]
    report = lab.report(range(len(lab.NODES)), arguments, 120, program=options["program"], **settings)
    print(json.dumps(report["rows"][0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--size", default="16M")
    parser.add_argument("--program", default=str(ROOT / "target/release/flexring"))
    options = parser.parse_args()
    for name, links in FABRICS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(topology(links, options.rate))
            file.flush()
            simulate = [options.program, "simulate", "--topology", file.name, "--size", options.size, "--no-path", "--json"]
            [result] = json.loads(subprocess.run(simulate, check=True, stdout=subprocess.PIPE).stdout)["results"]
            bound, simulated = result["bound_seconds"], result["picoseconds"] * 1e-12
            for algorithm in [], ["--algo", "ring"]:
                words = {"topology": file.name, "size": options.size, "program": options.program, "algorithm": algorithm}
                command = [ROOT / "bench/fabric_lab.sh", options.rate, *links, "--", sys.executable, __file__, json.dumps(words)]
                row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                median = row["out_of_place"]["median"] * 1e-6
                words = f"{name}, {algorithm[-1] if algorithm else 'forest'}: {median:.3f} s, {median / bound:.3f} of the bound"
                print(words + ("" if algorithm else f" (simulated: {simulated / bound:.3f})"), flush=True)


if __name__ == "__main__":
    if "LAB_NODES" in os.environ:
        inside(json.loads(sys.argv[1]))
    else:
        main()
